"""Models that no decoder shape can say, by name: each with the part that is missing here."""

from __future__ import annotations

STATE_SPACE = "has state-space layers (Mamba)"
LINEAR = "has linear-attention layers"
ENCODER = "is an encoder, which has no next-token loss"
BOTH = "has an encoder beside its decoder"

REFUSED: dict[str, str] = {
    "mamba": STATE_SPACE,
    "mamba2": STATE_SPACE,
    "falconmamba": STATE_SPACE,
    "jamba": STATE_SPACE,
    "bamba": STATE_SPACE,
    "zamba": STATE_SPACE,
    "zamba2": STATE_SPACE,
    "falconh1": STATE_SPACE,
    "nemotronh": STATE_SPACE,
    "granitemoehybrid": STATE_SPACE,
    "recurrentgemma": "has recurrent layers (RG-LRU)",
    "rwkv": "has recurrent layers (RWKV)",
    "xlstm": "has recurrent layers (xLSTM)",
    "qwen3next": LINEAR,
    "qwen35": LINEAR,
    "qwen35moe": LINEAR,
    "olmohybrid": LINEAR,
    "bailinghybrid": LINEAR,
    "kimilinear": LINEAR,
    "minimax": LINEAR,
    "minimaxtext01": LINEAR,
    "lfm2": "has convolution layers between attention",
    "lfm2moe": "has convolution layers between attention",
    "deepseekv32": "has sparse attention with an indexer",
    "deepseekv4": "has sparse attention with an indexer",
    "gemma3n": "has a per-layer embedding and shared keys and values",
    "bert": ENCODER,
    "roberta": ENCODER,
    "xlmroberta": ENCODER,
    "distilbert": ENCODER,
    "albert": ENCODER,
    "electra": ENCODER,
    "deberta": ENCODER,
    "debertav2": ENCODER,
    "modernbert": ENCODER,
    "megatronbert": ENCODER,
    "vit": ENCODER,
    "clip": ENCODER,
    "t5": BOTH,
    "mt5": BOTH,
    "umt5": BOTH,
    "switchtransformers": BOTH,
    "bart": BOTH,
    "mbart": BOTH,
    "pegasus": BOTH,
    "m2m100": BOTH,
    "marian": BOTH,
    "t5gemma": BOTH,
    "whisper": BOTH,
    "speecht5": BOTH,
    "mllama": "has cross-attention to a vision tower in its decoder",
}
"""`model_type` without underscores -> what it has, or is."""

_ENDINGS = (
    "ForCausalLM", "ForConditionalGeneration", "ForMaskedLM", "LMHeadModel", "ForPreTraining",
    "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "WithLMHead", "Model",
)  # fmt: skip


def why_refused(name: object) -> str | None:
    """Return what the model of this class or `model_type` has that we have not, or None."""
    if not isinstance(name, str):
        return None
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    return REFUSED.get("".join(letter for letter in name.lower() if letter.isalnum()))
