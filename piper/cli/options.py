"""Option types that refuse bad values in our words, and the options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import click

from cost_models.errors import InputError, require_positive, require_positive_int, whole_number

Function = Callable[..., Any]

_LARGEST_WHOLE_NUMBER = 2**63 - 1


class PositiveInt(click.ParamType[int]):
    """A whole number >= 1, written in digits: `1e3`, `8.0`, `-3` and `nan` are refused."""

    name = "n"

    def __init__(self, example: int) -> None:
        self.example = example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read digits."""
        text = str(value)
        number = whole_number(text)
        return require_positive_int(
            text if number is None else number,
            where="command line",
            field=_name_of(param),
            fix=f"write a whole number such as {self.example}",
        )


class WholeNumber(click.ParamType[int]):
    """A whole number >= 0."""

    name = "n"

    def __init__(self, example: int) -> None:
        self.example = example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read digits."""
        text = str(value)
        number = whole_number(text)
        if number is not None and number <= _LARGEST_WHOLE_NUMBER:
            return number
        raise InputError(
            where="command line",
            field=_name_of(param),
            value=text,
            rule="must be a whole number >= 0",
            fix=f"write a whole number such as {self.example}",
        )


class PositiveNumber(click.ParamType[float]):
    """A finite number > 0."""

    name = "x"

    def __init__(self, example: str) -> None:
        self.example = example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read a decimal number."""
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        return require_positive(
            number if number > 0 and math.isfinite(number) else str(value),
            where="command line",
            field=_name_of(param),
            fix=f"write a number such as {self.example}",
        )


class Clipping(PositiveNumber):
    """A largest gradient norm, or `none`, which is returned as 0.0 (no clipping)."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read a norm or `none`."""
        return 0.0 if value in ("none", 0.0) else super().convert(value, param, ctx)


class KeyValue(click.ParamType[tuple[str, str]]):
    """A `key=value` pair; which keys there are is judged by what they are for."""

    name = "k=v"

    def __init__(self, example: str, *, field: str = "value") -> None:
        self.example = example
        self.field = field

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        """Split at the first `=`."""
        key, equals, text = (piece.strip() for piece in str(value).partition("="))
        if not (key and equals and text):
            raise InputError(
                where="command line",
                field=self.field if param is None else _name_of(param),
                value=value,
                rule="is not key=value",
                fix=f"write for example {self.example}",
            )
        return key, text


class Counts(click.ParamType[tuple[int, ...]]):
    """Whole numbers >= 1, separated by commas."""

    name = "n"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Read the numbers; a repeated one counts once."""
        one = PositiveInt(64)
        return tuple(dict.fromkeys(one.convert(part.strip(), param, ctx) for part in str(value).split(",")))


def _name_of(param: click.Parameter | None) -> str:
    return param.opts[0] if param is not None else "value"


def json_option(function: Function) -> Function:
    """Add `--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")(
        function
    )


def strategy_option(function: Function) -> Function:
    """Add `--strategy` (one)."""
    return click.option(
        "--strategy",
        metavar="FILE|SHORTHAND",
        default="",
        help="Strategy file, or for example pp=4,dp=16,zero=1,schedule=1f1b,recompute=full.",
    )(function)


_ONE_GPUS = click.option(
    "--gpus", type=PositiveInt(64), help="GPUs (default: the product of the given degrees, else one node)."
)
_SEVERAL_GPUS = click.option(
    "--gpus",
    type=Counts(),
    metavar="N[,N...]",
    help="GPUs (default: one node); several numbers are searched together.",
)
_JOB_OPTIONS = (
    click.option(
        "--cluster", metavar="NAME|FILE", help="Cluster (default: one node of dgx-h100); `piper clusters`."
    ),
    _ONE_GPUS,
    click.option(
        "--seq-len", type=PositiveInt(8192), help="Tokens per sequence (default: the model's, at most 8192)."
    ),
    click.option("--global-batch", type=PositiveInt(512), help="Sequences per optimizer step."),
    click.option(
        "--micro-batch", type=PositiveInt(1), help="Sequences per microbatch of a replica (default: 1)."
    ),
    click.option(
        "--dtype", metavar="bf16|fp16|fp32|fp8|mxfp8|nvfp4", help="Compute dtype (default: bf16; CPU: fp32)."
    ),
    click.option("--optimizer", metavar="NAME", help="adamw (default), adamw8bit, momentum, sgd."),
    click.option(
        "--clip-grad-norm",
        type=Clipping("1.0"),
        metavar="X|none",
        help="Largest gradient norm (default: 1.0).",
    ),
    click.option("--stack", metavar="NAME|FILE", help="Framework profile (default: piper); `piper stacks`."),
    click.option(
        "--recipe",
        metavar="FILE",
        help="YAML file that changes the stack: model (attention, norm, activation, cross_entropy), "
        "strategy (zero, bucket_mb, gradient_dtype, ...), cost "
        "(expandable_segments, contention).",
    ),
    click.option(
        "--set",
        "settings",
        type=KeyValue("model.attention=math"),
        multiple=True,
        help="One value of a recipe, such as model.cross_entropy=chunked or cost.expandable_segments=true "
        "(repeatable).",
    ),
    click.option(
        "--mfu-convention",
        metavar="NAME",
        help="How model FLOPs are counted: palm (default), causal, megatron, nemo, narayanan, torchtitan, "
        "6n.",
    ),
)


def job_options(function: Function) -> Function:
    """Add the options that describe a job apart from model and strategy."""
    for option in reversed(_JOB_OPTIONS):
        function = option(function)
    return function


def search_job_options(function: Function) -> Function:
    """Add the same, with several numbers of GPUs."""
    for option in reversed(_JOB_OPTIONS):
        function = _SEVERAL_GPUS(function) if option is _ONE_GPUS else option(function)
    return function


def whole_run_options(function: Function) -> Function:
    """Add what asks for days and cost of a whole run."""
    for option in (
        click.option(
            "--price",
            metavar="X|FILE",
            help="Per GPU and hour: a number, or a file of prices; with --tokens.",
        ),
        click.option(
            "--tokens", type=PositiveInt(10**12), metavar="N", help="Train on so many: days and GPU-hours."
        ),
    ):
        function = option(function)
    return function
