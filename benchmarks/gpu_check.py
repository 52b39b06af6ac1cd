"""One GPU in under five minutes: profile, calibrate, then a transformer step with and without recomputation.

Kernels, attention, optimizer and launches are measured; four fifths of the rows fit a cluster file, the
others say how far off it is. A small Llama then trains a step in plain PyTorch (bf16 with fp32 gradients and
masters on a GPU, fp32 on a CPU); its time and peak memory are compared with what the file predicts, and with
what the catalogue says without any measurement. Where there is no GPU it says so and ends;
`--device cpu` runs the same code there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from cost_models.calibration import Calibration, calibrate
from cost_models.documents import yaml_text
from piper.predict import Job, predict
from piper.profiling.machine import Profiling, profile
from piper.strategy import Strategy

LIMIT_S = {"cuda": 120.0, "cpu": 60.0}
MODELS = {
    "cuda": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 12, "vocab_size": 32000},
    "cpu": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 512},
}
BATCHES = {"cuda": (4, 2048), "cpu": (2, 128)}
"""Sequences of a step and their length."""

DTYPES = {"cuda": "bf16", "cpu": "fp32"}
NEAREST = {
    "H100": "dgx-h100", "H200": "dgx-h200", "B200": "dgx-b200", "A100": "dgx-a100", "CPU": "local-cpu",
}  # fmt: skip
"""Cluster of the catalogue by a part of the device's name; others are told with --cluster."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda; ends where there is none"
    )
    parser.add_argument("--cluster", metavar="NAME", help="nearest cluster of the catalogue")
    parser.add_argument("--quick", action="store_true", help="half of the shapes, fewer repeats")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--keep", metavar="F.yaml", help="keep the fitted cluster file")
    options = parser.parse_args()
    if options.device == "cuda" and not _has_gpu():
        _say("gpu_check: this machine has no GPU that torch sees; --device cpu checks the code without one")
        print(json.dumps({"benchmark": "gpu_check", "device": None}))
        return
    found = check(options.device, base=options.cluster, quick=options.quick, keep=options.keep)
    if not options.json:
        show(found)
    print(json.dumps({"benchmark": "gpu_check"} | found))


def check(device: str, *, base: str | None, quick: bool, keep: str | None = None) -> dict[str, Any]:
    """Return errors of kernels held out, and predicted against measured steps."""
    started = time.monotonic()
    rows = list(profile(Profiling(device=device, quick=quick, limit_s=LIMIT_S[device], report=_say)))
    base = base or nearest_cluster(rows[0].device, device)
    fitted = calibrate(rows, base=base, name="measured", report=_say)
    profiled = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(keep or Path(folder) / "measured.yaml")
        cluster.write_text(yaml_text(fitted.content), encoding="utf-8")
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(model_of(device)), encoding="utf-8")
        steps = [
            compare_step(
                config, device, recompute=recompute, clusters={"fitted": str(cluster), "catalogue": base}
            )
            for recompute in (False, True)
        ]
    return {
        "device": fitted.device,
        "base": base,
        "rows": len(rows),
        "launch_us": launch_us(fitted),
        "errors": {error.op: {"median": error.median, "held_out": error.held_out} for error in fitted.errors},
        "steps": steps,
        "timings_s": {"profile": profiled - started, "steps": time.monotonic() - profiled},
    }


def nearest_cluster(name: str, device: str) -> str:
    """Return the cluster whose figures hold for what is not measured; exits for a device without one."""
    if device == "cpu":
        return NEAREST["CPU"]
    found = [cluster for part, cluster in NEAREST.items() if part in name]
    if not found:
        sys.exit(f"error: no cluster of the catalogue is known for {name}\nfix: give --cluster NAME")
    return found[0]


def model_of(device: str) -> dict[str, Any]:
    """Return the config.json of the model that is trained."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "attention_bias": False, "num_attention_heads": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float32",
        "max_position_embeddings": BATCHES[device][1], **MODELS[device],
    }  # fmt: skip


def launch_us(fitted: Calibration) -> float | None:
    text = fitted.content.get("host", {}).get("launch_overhead")
    return None if text is None else float(str(text).removesuffix("us"))


def compare_step(config: Path, device: str, *, recompute: bool, clusters: dict[str, str]) -> dict[str, Any]:
    """Train a few steps and predict one."""
    _say(f"a step {'with' if recompute else 'without'} recomputation")
    seconds, peak = measure_step(config, device, recompute=recompute)
    predicted = {
        name: predict_step(config, device, cluster, recompute=recompute) for name, cluster in clusters.items()
    }
    times = {name: found["step_time_s"] for name, found in predicted.items()}
    return {
        "recompute": recompute,
        "measured_s": seconds,
        "predicted_s": times["fitted"],
        "catalogue_s": times["catalogue"],
        "error": times["fitted"] / seconds - 1,
        "measured_bytes": peak,
        "predicted_bytes": predicted["fitted"]["peak_memory_bytes"],
        "memory_error": None if peak is None else predicted["fitted"]["peak_memory_bytes"] / peak - 1,
    }


def predict_step(config: Path, device: str, cluster: str, *, recompute: bool) -> dict[str, Any]:
    batch, seq_len = BATCHES[device]
    job = Job(
        model=str(config), strategy=Strategy.parse(f"recompute={'full' if recompute else 'none'}"), gpus=1,
        cluster=cluster, global_batch=batch, micro_batch=batch, seq_len=seq_len, dtype=DTYPES[device],
        clip_grad_norm=None,
    )  # fmt: skip
    return predict(job).result


def measure_step(config: Path, device: str, *, recompute: bool) -> tuple[float, int | None]:
    """Return the median step time and the peak of allocated bytes (None on a CPU) of plain PyTorch."""
    import torch

    batch, seq_len = BATCHES[device]
    step = TrainingStep(_built(config, device, recompute=recompute), device)
    tokens = torch.randint(0, MODELS[device]["vocab_size"], (batch, seq_len + 1), device=device)
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if device == "cpu" else threads)
    for _ in range(2):
        step.run(tokens)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = [_timed(lambda: step.run(tokens), device) for _ in range(5)]
    torch.set_num_threads(threads)
    return statistics.median(times), torch.cuda.max_memory_allocated() if device == "cuda" else None


def _built(config: Path, device: str, *, recompute: bool) -> Any:
    from torch.utils.checkpoint import checkpoint

    from piper.models import build_module, find_model

    module = build_module(
        find_model(str(config)), dtype=DTYPES[device], device=device, seq_len=BATCHES[device][1]
    )
    if recompute:
        for layer in module.model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return module.train()


class TrainingStep:
    """Forward, backward, gradients in fp32, AdamW on fp32 masters: what a plan of one rank does."""

    def __init__(self, module: Any, device: str) -> None:
        import torch

        self.module = module
        self.parameters = list(module.parameters())
        self.masters = [
            p.detach().float().clone() if p.dtype != torch.float32 else p for p in self.parameters
        ]
        self.gradients = [torch.zeros_like(p, dtype=torch.float32) for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-4, fused=device == "cuda")
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.register_post_accumulate_grad_hook(partial(self._add, gradient))

    @staticmethod
    def _add(gradient: Any, parameter: Any) -> None:
        gradient.add_(parameter.grad)
        parameter.grad = None

    def run(self, tokens: Any) -> None:
        """Train one step."""
        import torch

        loss = self.module(tokens[:, :-1], tokens[:, 1:]) / tokens.numel()
        loss.backward()
        with torch.no_grad():
            for master, gradient in zip(self.masters, self.gradients, strict=True):
                master.grad = gradient
            self.optimizer.step()
            for parameter, master, gradient in zip(
                self.parameters, self.masters, self.gradients, strict=True
            ):
                master.grad = None
                gradient.zero_()
                if parameter is not master:
                    parameter.copy_(master)


def _timed(call: Callable[[], None], device: str) -> float:
    import torch

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    wait()
    begin = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - begin


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def show(found: dict[str, Any]) -> None:
    print(f"{found['device']}, {found['rows']} measurements, the rest as {found['base']}")
    for op, error in found["errors"].items():
        print(f"  {op:16} median error {error['median']:6.1%} of {error['held_out']} rows held out")
    for step in found["steps"]:
        memory = "" if step["memory_error"] is None else f", memory {step['memory_error']:+.1%}"
        kind = "with" if step["recompute"] else "without"
        times = [f"{step[key] * 1e3:.1f} ms" for key in ("predicted_s", "catalogue_s", "measured_s")]
        print(
            f"step {kind} recomputation: {times[0]} predicted ({times[1]} by the catalogue), "
            f"{times[2]} measured ({step['error']:+.1%}){memory}"
        )


if __name__ == "__main__":
    main()
