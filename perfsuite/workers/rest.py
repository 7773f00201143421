"""An item that does nothing: a place to tear fixtures down to, where nobody knows yet which case comes next."""

from __future__ import annotations

import pytest


class Rest(pytest.Item):
    """Named as the next item it keeps its parent's fixtures; run, it lets those go that the next one does not share."""

    def runtest(self) -> None:
        """Nothing."""


def rest_of(node: pytest.Collector) -> pytest.Item:
    """Whatever may come next below ``node``."""
    rest: Rest = Rest.from_parent(node, name="rest")
    return rest
