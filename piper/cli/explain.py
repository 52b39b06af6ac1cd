"""`piper explain`: where the step goes, what limits it, what would help most."""

from __future__ import annotations

from typing import Any

import click

from piper.cli.jobs import job_of
from piper.cli.options import job_options, json_option, strategy_option
from piper.cli.output import emit, progress


@click.command()
@click.argument("model", metavar="MODEL")
@strategy_option
@click.option("--against", metavar="FILE|SHORTHAND", help="A second strategy, compared with the first.")
@job_options
@json_option
def explain(*, model: str, strategy: str, against: str | None, as_json: bool, **given: Any) -> None:
    """Explain the predicted step: its parts, its critical path, what changes would gain, what memory holds.

    Changes are links twice as fast, kernels of a kind 10 % faster, and launches for free: each is simulated.
    Of memory, the largest tensors that forward keeps for backward, with the operators that saved them.

    \b
    Examples:
      piper explain llama3-8b --strategy pp=4,dp=2
      piper explain llama3-8b --gpus 16 --strategy pp=4,tp=2,dp=2 --against tp=8,dp=2 --json
    """
    from piper.predict import predict
    from piper.report import explanation

    with progress(f"explaining {model}"):
        jobs = [job_of(model, text, dict(given)) for text in (strategy, against) if text is not None]
        predictions = [predict(job) for job in jobs]
        explained = [explanation.explain_prediction(prediction) for prediction in predictions]
    first = predictions[0].result
    head = ("schema_version", "model", "cluster", "n_gpus", "stack")
    result: dict[str, Any] = {name: first[name] for name in head} | explained[0]
    text = explanation.explanation_text(first, explained[0])
    if against is not None:
        found = explanation.differences(*explained)
        result["against"] = explained[1] | {"difference_s": found}
        names = tuple(each["strategy"]["shorthand"] for each in explained)
        steps = [prediction.result for prediction in predictions]
        lines = explanation.difference_lines((names[0], names[1]), found, results=steps)
        text = "\n\n".join(
            [text, explanation.explanation_text(predictions[1].result, explained[1]), "\n".join(lines)]
        )
    emit(result, as_json=as_json, text=lambda: text)
