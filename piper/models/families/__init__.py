"""Readers of published configs, one file for each family: `read(config, *, where) -> DecoderShape`.

A reader is free of torch, takes the defaults of the family's own Hugging Face config class (published files
leave out what equals them), and refuses by name (ModelError) what the family has and a `DecoderShape` cannot
say. What several families read alike lies in `piper.models.fields` (single fields) and `piper.models.reading`
(sizes, rotary embedding, experts; the whole file: `config`).
"""
