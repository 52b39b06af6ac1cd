"""The plan: what each device does in one step. The narrow waist between compiler, simulator and runtime.

Glossary (left = the only spelling in code):

microbatch        one slice of a replica's batch per step, index `microbatch` (size `micro_batch`)
global_batch      samples per optimizer step = replica batch x data-parallel degree
segment           maximal run of operators with one tag stack; smallest schedulable piece
stage             contiguous model part, numbered through the model, 0..S-1
virtual stage     the V stages hosted by one pipeline rank when S = V*P
pipeline rank     a position on the pipeline axis, owning >= 1 stage and >= 1 device
rank / device     global process index / one GPU; 1:1 in a run
axis / dim        of a mesh / of a tensor
degree            size of a parallel axis
F B BI BW R       forward; fused backward; backward for inputs; for weights; recompute
slot              one cell of a rank's order row; two tasks in one slot may overlap
bucket            parameters or gradients moved by one collective
transfer          send + recv; `eager` returns before the peer, `rendezvous` waits
static memory     parameters, gradients, optimizer state; activation memory: kept for backward
step time         one optimizer step, all microbatches; the steady-state period
"""

from simulator.plan.buffers import Bucket, BufferTable, MemoryClass
from simulator.plan.cuts import Cuts, ParameterCut, Region
from simulator.plan.mesh import Group, Mesh
from simulator.plan.plan import (
    DevicePlan,
    Edge,
    IndexLists,
    LayerFacts,
    ModelFacts,
    Parameter,
    Plan,
    Segment,
    StreamRuleFacts,
    TaskTable,
    TensorSpec,
    TrainingFacts,
    Work,
)
from simulator.plan.states import StateDtypes
from simulator.plan.task import (
    COLLECTIVE_KINDS,
    COMPUTE_KINDS,
    HOST_COPY_KINDS,
    MATCHING_SEND,
    NONE,
    RECV_KINDS,
    SEND_KINDS,
    Task,
    TaskKind,
    TaskName,
)

__all__ = [
    "COLLECTIVE_KINDS",
    "COMPUTE_KINDS",
    "HOST_COPY_KINDS",
    "MATCHING_SEND",
    "NONE",
    "RECV_KINDS",
    "SEND_KINDS",
    "Bucket",
    "BufferTable",
    "Cuts",
    "DevicePlan",
    "Edge",
    "Group",
    "IndexLists",
    "LayerFacts",
    "MemoryClass",
    "Mesh",
    "ModelFacts",
    "Parameter",
    "ParameterCut",
    "Plan",
    "Region",
    "Segment",
    "StateDtypes",
    "StreamRuleFacts",
    "Task",
    "TaskKind",
    "TaskName",
    "TaskTable",
    "TensorSpec",
    "TrainingFacts",
    "Work",
]
