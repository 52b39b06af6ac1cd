"""`CapturedModel`: what capture learned about a model at one microbatch size. Free of torch, JSON both ways.

[Note: what a segment keeps]
Between F and B a segment keeps `saved_bytes` of tensors made inside it, plus those of its inputs and
outputs that some operation saved (`inputs_saved`, `outputs_saved`): a boundary tensor is one buffer,
however many segments save it, so the compiler must see it apart. Parameters are never counted.

[Note: what a split backward keeps]
B = BI + BW (see `piper.capture.split`). From BI to BW a segment keeps `saved_for_weights_bytes` of its
`saved_bytes`, `gradients_for_weights_bytes` that BI made, and of the tensors at its borders those inputs
and outputs (`..._saved_for_weights`) and gradients of outputs (`output_gradients_for_weights`) that BW
reads. A segment whose inputs need no gradient has an empty BI and keeps all.

[Note: what tensor parallelism cuts]
In regions tagged TP (and EP: expert tensor parallelism) every operation says which dimension of its shape
is cut (`Operation.tensor_dim`), and `tensor_layout` says the same of the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from cost_models.ops import Operation
from simulator.plan import ModelFacts, Parameter, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCost:
    """One pass of a segment: its kernels, and the largest transient memory while it runs.

    Args:
        operations: kernels in order, equal ones joined.
        workspace_bytes: highest bytes alive at any moment of the pass beyond its inputs, the tensors
            kept at its end, and (B) those kept at its begin; a B counts the gradients of the segment's
            parameters here, for they are added to the main gradients and freed segment by segment.
        workspace_whole_bytes: of these, what tensor parallelism leaves whole inside a region (sums over
            cut features, such as gradients of the region's inputs); 0 outside of regions.
    """

    operations: tuple[Operation, ...]
    workspace_bytes: int
    workspace_whole_bytes: int = 0


NOTHING = PassCost(operations=(), workspace_bytes=0)
"""A pass without work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A buffer that autograd keeps from F to B.

    Args:
        saved_by: the operator that needs it first in backward, "aten.mm.default".
        made_by: the operator that filled it last; "" for one that came from another segment.
        shape, dtype: as that operator kept it.
        bytes: of the whole buffer.
        border: "input" or "output" where it is a boundary tensor, "" inside the segment.
        for_weights: whether BW reads it ([Note: what a split backward keeps]).
    """

    saved_by: str
    made_by: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    border: str = ""
    for_weights: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedSegment:
    """A run of operators with one tag stack.

    Args:
        name: for people, e.g. "layers.3" or "PP3".
        tags: tag name -> index, sorted by name.
        parameters: fully qualified names, in order of first use.
        inputs: (segment, output) pairs; segment -1 is the model input of that number.
        outputs: tensors that later segments or the loss take.
        forward: F with gradients enabled (without counting what is kept).
        forward_no_grad: F whose activations are thrown away (recompute).
        backward: B: gradients of inputs and parameters; without accumulation into fp32.
        backward_inputs: BI: the operations of B that the gradients of the inputs need.
        backward_weights: BW: the others.
        saved_bytes: kept from F to B, apart from inputs and outputs.
        saved_whole_bytes: of `saved_bytes`, what every rank of a tensor-parallel region keeps whole, because
            the region gathers it: logits, for a loss that is not cut.
        saved_gathers_bytes: of `saved_whole_bytes`, what exists only because it is gathered.
        inputs_saved: for each input, whether an operation of the segment saved it.
        outputs_saved: the same for each output.
        saved_for_weights_bytes: of `saved_bytes`, what BW reads.
        gradients_for_weights_bytes: what BI makes and BW reads.
        saved_by_kind: (kind of operation, bytes of `saved_bytes` that such operations made in F, of these
            what BW reads), by kind.
        saved_tensors: every buffer kept from F to B, parameters apart, in the order in which F keeps them;
            those inside (no border) sum to `saved_bytes`.
        inputs_saved_for_weights, outputs_saved_for_weights: as above, but only what BW reads.
        output_gradients_for_weights: for each output, whether BW reads its gradient.
        input_gradients_for_weights: for each input, whether BW reads the gradient that BI makes of it (which
            is not in `gradients_for_weights_bytes`).
        shared_gradients: for each output, -1, or the number of a tensor that is also the gradient of other
            outputs that BW reads; empty: no output shares its gradient.
        tensor_layout: for each parameter used inside a TP or EP region, the dimension that is cut (for
            `nn.Linear`: 0 output features or table entries, 1 input features), -1: every rank has it whole.
        tensor_refused: parameters that no rule cuts: a matmul after a row-parallel one.
    """

    name: str
    tags: tuple[tuple[str, int], ...]
    parameters: tuple[str, ...]
    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[TensorSpec, ...]
    forward: PassCost
    forward_no_grad: PassCost
    backward: PassCost
    saved_bytes: int
    inputs_saved: tuple[bool, ...]
    outputs_saved: tuple[bool, ...]
    backward_inputs: PassCost = NOTHING
    backward_weights: PassCost = NOTHING
    saved_whole_bytes: int = 0
    saved_gathers_bytes: int = 0
    saved_for_weights_bytes: int = 0
    gradients_for_weights_bytes: int = 0
    saved_by_kind: tuple[tuple[str, int, int], ...] = ()
    saved_tensors: tuple[SavedTensor, ...] = ()
    inputs_saved_for_weights: tuple[bool, ...] = ()
    outputs_saved_for_weights: tuple[bool, ...] = ()
    output_gradients_for_weights: tuple[bool, ...] = ()
    input_gradients_for_weights: tuple[bool, ...] = ()
    shared_gradients: tuple[int, ...] = ()
    tensor_layout: tuple[tuple[str, int], ...] = ()
    tensor_refused: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CapturedModel:
    """A model as segments, at one microbatch size, sequence length and dtype.

    Args:
        facts: counts for reports.
        parameters: every parameter once (tied ones too), in the order of `module.parameters()`.
        segments: in execution order; the last one's first output is the summed loss.
        buffer_bytes: bytes of the module's buffers (tables, masks), held by every device.
        micro_batch, seq_len, dtype: what it was captured with.
        notices: what was assumed about the module, for the user.
    """

    facts: ModelFacts
    parameters: tuple[Parameter, ...]
    segments: tuple[CapturedSegment, ...]
    buffer_bytes: int
    micro_batch: int
    seq_len: int
    dtype: str
    notices: tuple[str, ...] = ()

    @cached_property
    def tag_names(self) -> tuple[str, ...]:
        """Return the tags of all segments and "PP", which every segment gets, rising."""
        return tuple(sorted({"PP", *(tag for segment in self.segments for tag, _ in segment.tags)}))

    @cached_property
    def trained_numel(self) -> dict[str, int]:
        """Return the elements of every parameter that is trained, by name."""
        return {p.name: p.numel for p in self.parameters if p.trainable}
