"""Stack profiles, what a framework does: name -> file.

To add one: write `<name>.yaml` beside this file with the sections `model` and `strategy` (plain data, taken
as defaults by capture and strategy) and `cost` (the only one that `cost_models` interprets); add one line to
`STACKS`. Names are lower case.
"""

STACKS = {
    "piper": "piper.yaml",
}

ALIASES: dict[str, str] = {}
