"""`piper stacks`: framework profiles in the catalogue, or one in detail."""

from __future__ import annotations

import click

from piper.cli.catalogue import plain, show_entry, show_list
from piper.cli.options import json_option


@click.command()
@click.argument("name", metavar="[NAME|FILE]", required=False)
@json_option
def stacks(name: str | None, as_json: bool) -> None:
    """List framework profiles, or show one.

    \b
    Examples:
      piper stacks
      piper stacks piper --json
    """
    from cost_models.catalogue import load_stack
    from cost_models.stacks import STACKS

    if name is not None:
        show_entry(plain(load_stack(name)), as_json=as_json)
        return
    entries = [plain(load_stack(entry)) for entry in STACKS]
    show_list("stacks", entries, columns={"name": "name", "description": "description"}, as_json=as_json)
