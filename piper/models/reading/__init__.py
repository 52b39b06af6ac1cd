"""From `config.json` to a shape: what all families have in common.

`config` decides which family reads which part of a file; `trunk` (sizes), `rope` (rotary embedding) and
`routing` (experts) are what several read alike; `towers`, `adapters`, `own_keys` and `refused` are about what
stands beside a decoder. `parts` and `checks` read a shape that is stated by its own fields.
"""
