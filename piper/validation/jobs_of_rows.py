"""A published run -> the job to predict, what was assumed of it, and the step time that was measured."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cost_models import load_stack
from piper.errors import JobError
from piper.predict import Job
from piper.strategy import Strategy
from piper.validation.models_of_rows import model_of_row, with_vocabulary
from piper.validation.places import cluster_of_row
from piper.validation.rows import PublishedRow
from piper.validation.stacks import padded_vocabulary, stack_of_row
from simulator.conventions import DEFAULT, model_flops_per_token

if TYPE_CHECKING:
    from cost_models.catalogue import Stack
    from simulator.plan import ModelFacts

GB = 1e9

DTYPE = "bf16"
"""Where a row does not say; fp16 has the same peak and the same bytes."""

SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved_1f1b": "interleaved_1f1b",
    "1f1b-i": "interleaved_1f1b",
    "zb_1p": "zb_1p",
    "zb_2p": "zb_2p",
    "zb_h1": "zb_h1",
    "zb_h2": "zb_h2",
    "zbv": "zbv",
    "pipeline": "",
}
"""What the column `schedule` may begin with, and the schedule it means; "": the stack's."""

RECOMPUTE = {"none": "none", "selective": "selective", "full": "full"}

_GPUS_OF_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RowJob:
    """A row as a job.

    Args:
        row: the published run.
        job: what to predict.
        assumed: fields that the row leaves open.
        measured_s: of a step; None: the run did not fit, or no figure was published.
        measured_bytes: peak memory; None: not published.
    """

    row: PublishedRow
    job: Job
    assumed: tuple[str, ...]
    measured_s: float | None
    measured_bytes: float | None


def job_of_row(row: PublishedRow, *, stack: str = "auto") -> RowJob:
    """Return the job of a published run.

    Args:
        row: what was published.
        stack: name or file, or "auto": by the framework and date of the row.
    Raises: InputError of any kind for what cannot be told; its text is the reason to skip the row.
    """
    stack = stack_of_row(row, stack=stack)
    profile = load_stack(stack)
    cluster = cluster_of_row(row)
    reading = _Reading(row=row, profile=profile, assumed=[])
    source, open_parts = model_of_row(row, context=row.seq_len)
    reading.assumed.extend(open_parts)
    seq_len = row.seq_len or reading.assume("seq_len", source.default_seq_len)
    degrees = reading.degrees()
    if source.shape is not None:
        size = padded_vocabulary(source.shape.vocabulary, stack=profile.name, tp=degrees["tp"])
        source = with_vocabulary(source, size)
    global_batch, micro_batch = reading.batches(degrees["dp"])
    shorthand = reading.shorthand(degrees)
    job = Job(
        model=source,
        strategy=Strategy.parse(",".join(f"{key}={value}" for key, value in shorthand.items())),
        cluster=cluster,
        gpus=row.integer("n_gpus"),
        seq_len=seq_len,
        global_batch=global_batch,
        micro_batch=micro_batch,
        dtype=row.text("dtype") or reading.assume("dtype", DTYPE),
        stack=stack,
        settings=_kernels(row),
    )
    facts = source.facts
    memory = row.number("peak_mem_gb")
    return RowJob(
        row=row,
        job=job,
        assumed=tuple(reading.assumed),
        measured_s=None if row.oom else measured_step_s(row, facts, seq_len=seq_len, batch=global_batch),
        measured_bytes=None if memory is None or row.oom else memory * GB,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    row: PublishedRow
    profile: Stack
    assumed: list[str]

    def assume(self, field: str, value: Any) -> Any:
        self.assumed.append(field)
        return value

    def default(self, key: str, fallback: Any) -> Any:
        return self.profile.strategy.get(key, fallback)

    def degrees(self) -> dict[str, int]:
        """Return tp, pp, cp, dp: n_gpus wins over dp; of open ones the first follows, the others are 1."""
        row = self.row
        gpus = row.integer("n_gpus")
        if gpus is None:
            raise self.refused("n_gpus", "is not stated")
        stated = {name: row.integer(name) for name in ("tp", "pp", "cp", "dp")}
        if stated["tp"] is None and stated["pp"] is None:
            if stated["dp"] is None:
                raise self.refused("tp, pp, dp", "are not stated")
            stated["tp"] = self.assume("tp", min(_GPUS_OF_NODE, gpus // stated["dp"]))
        found = {name: value or 1 for name, value in stated.items()}
        open_ones = [name for name, value in stated.items() if value is None]
        others = 1
        for name in ("tp", "pp", "cp"):
            others *= found[name]
        if "pp" in open_ones and stated["dp"] is not None and gpus % (others * found["dp"]) == 0:
            found["pp"] = gpus // (others * found["dp"])
            others *= found["pp"]
        self.assumed.extend(name for name in open_ones if name not in {"tp", "dp"})
        if gpus % others:
            raise self.refused("n_gpus", f"is no multiple of tp x pp x cp = {others}")
        if stated["dp"] not in {None, gpus // others}:
            self.assumed.append("dp")
        found["dp"] = gpus // others
        return found

    def batches(self, dp: int) -> tuple[int, int]:
        """Return the global batch and the microbatch."""
        row = self.row
        whole, micro, number = (row.integer(name) for name in ("global_batch", "micro_batch", "grad_accum"))
        if whole is None:
            if micro is None:
                raise self.refused("global_batch", "is not stated")
            whole = self.assume("global_batch", micro * dp * (number or 1))
        if whole % dp:
            raise self.refused("global_batch", f"is no multiple of dp = {dp}")
        if micro is None:
            exact = number is not None and whole % (dp * number) == 0
            micro = self.assume(
                "micro_batch", whole // (dp * number) if exact and number else self.default("micro_batch", 1)
            )
        return whole, min(micro, whole // dp)

    def shorthand(self, degrees: dict[str, int]) -> dict[str, Any]:
        """Return the strategy."""
        row = self.row
        found: dict[str, Any] = {name: degrees[name] for name in ("tp", "pp", "cp", "dp")}
        found |= self.pipeline(degrees["pp"])
        experts = row.integer("ep") or 1
        if experts > 1:
            found["ep"] = experts
            if "expert-tp=1" in row.text("notes").lower():
                found["etp"] = 1
        found["zero"] = self.zero()
        shards = self.shards(degrees["dp"])
        if found["zero"] and shards:
            found["hsdp"] = shards
        if degrees["tp"] > 1:
            stated = {"true": "on", "false": "off"}.get(row.text("sequence_parallel").lower())
            found["sp"] = stated or self.assume("sequence_parallel", self.default("sp", "on"))
            if "async tp" in row.text("framework").lower():
                found["async_tp"] = "on"
        recompute = RECOMPUTE.get(row.text("act_ckpt").lower())
        found["recompute"] = recompute or self.assume("act_ckpt", self.default("recompute", "none"))
        return found

    def pipeline(self, pp: int) -> dict[str, Any]:
        if pp == 1:
            return {}
        row = self.row
        text = row.text("schedule").lower()
        # The longest key wins: "1f1b-i ..." also begins with "1f1b".
        keys = sorted((key for key in SCHEDULES if text.startswith(key)), key=len)
        if text and not keys:
            raise self.refused("schedule", "is not known")
        named = SCHEDULES[keys[-1]] if keys else ""
        stated = row.integer("vp")
        vp = stated or self.virtual_stages(pp)
        schedule = named or ("interleaved_1f1b" if vp > 1 else self.default("schedule", "1f1b"))
        if not text:
            self.assumed.append("schedule")
        if stated is None:
            self.assumed.append("vp")
        if schedule == "interleaved_1f1b" and vp == 1:
            schedule = "1f1b"
        found: dict[str, Any] = {"schedule": schedule}
        if vp > 1 and schedule in {"interleaved_1f1b", "looped_bfs", "interleaved_zb"}:
            found["vp"] = vp
        return found

    def virtual_stages(self, pp: int) -> int:
        """Return the stages of a pipeline rank where the row does not say: the stack's habit."""
        layers = self.row.integer("layers") or pp
        interleaved = self.row.text("schedule").lower().startswith(("1f1b-i", "interleaved"))
        if self.default("vp", 1) != "layers" and not interleaved:
            return 1
        return layers // pp if layers % pp == 0 else 1

    def zero(self) -> int:
        stated = self.row.text("zero_stage")
        if stated:
            return int(float(stated))
        return int(self.assume("zero_stage", self.default("zero", 0)))

    def shards(self, dp: int) -> int | None:
        """Return over how many ranks the state is cut where the row names a group below dp."""
        named = re.search(r"(?:FSDP=|group )(\d+)", self.row.text("sharding"))
        if not named:
            return None
        size = int(named.group(1))
        return size if 1 < size < dp and dp % size == 0 else None

    def refused(self, field: str, rule: str) -> JobError:
        row = self.row
        return JobError(
            where=f"row {row.case_id}", field=field, value=row.text(field.partition(",")[0]) or None,
            rule=rule, fix="state it in the row",
        )  # fmt: skip


_ATTENTION = {
    "none (torch)": "eager",
    "none (megatron fused softmax kernel)": "fused_softmax",
    "none": "fused_softmax",
}
"""The column `flash_attention` -> the kernel, where it says that there is none."""


def _kernels(row: PublishedRow) -> tuple[tuple[str, str], ...]:
    """Return the kernels that the row itself states."""
    found: list[tuple[str, str]] = []
    flash = row.text("flash_attention").lower()
    if flash in _ATTENTION:
        found.append(("model.attention", _ATTENTION[flash]))
    elif flash:
        found.append(("model.attention", "flash"))
        named = re.search(r"v1|attention2|\b2\b|flash_attention2", flash)
        if named:
            found.append(("cost.attention_kernel", "flash1" if "v1" in flash else "flash2"))
    norm = re.search(r"fused rmsnorm kernel=(yes|no)", row.text("notes").lower())
    if norm:
        found.append(("model.norm", "fused" if norm.group(1) == "yes" else "unfused"))
    return tuple(found)


_CONVENTIONS = (
    (r"eq\.?\(3\)", "narayanan"),
    (r"72blsh", "nemo"),
    (r"palm|6n ?\+ ?12", "palm"),
    (r"bf16 mfu vs 989", "megatron"),
    (r"flop_utils|megatron", "megatron"),
)
"""The column `flops_convention` -> a name of `simulator.conventions`, by the first pattern that it has."""


def measured_step_s(row: PublishedRow, facts: ModelFacts | None, *, seq_len: int, batch: int) -> float | None:
    """Return the measured step time: as printed, from tokens per second, or from TFLOP/s or MFU."""
    printed = row.number("step_time_s")
    if printed is not None:
        return printed
    gpus = row.integer("n_gpus") or 1
    tokens = batch * seq_len
    rate = row.number("tokens_per_s_per_gpu")
    if rate is not None:
        return tokens / (rate * gpus)
    tflops, mfu = row.number("tflops_per_gpu"), row.number("mfu")
    if facts is None or (tflops is None and mfu is None):
        return None
    text = row.text("flops_convention").lower()
    name = next((name for pattern, name in _CONVENTIONS if re.search(pattern, text)), DEFAULT)
    flops = tokens * model_flops_per_token(facts, seq_len=seq_len, convention=name)
    peak = re.search(r"/ ?(\d+(?:\.\d+)?) ?tf|vs (\d+(?:\.\d+)?) tf", text)
    if tflops is None:
        if mfu is None or peak is None:
            return None
        tflops = mfu * float(peak.group(1) or peak.group(2))
    return flops / (tflops * 1e12 * gpus)
