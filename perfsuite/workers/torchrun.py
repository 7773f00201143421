"""A user's own torchrun: which of its processes this is, and how rank 0 tells the others where it listens."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perfsuite.workloads.groups import PATIENCE

_KEY = "coordinator"
OVER = "over"
"""Published in place of an address: there is nothing to measure."""


@dataclass(frozen=True, kw_only=True)
class Torchrun:
    """This process among those that torchrun has started, one a rank, and the store that they share."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    host: str
    port: int
    agent_hosts_store: bool
    name: str
    """Of this start of the processes: after a restart the store still holds what the last ones have said."""

    @property
    def one_host(self) -> bool:
        """Whether torchrun runs on one host alone, as far as it says."""
        return self.local_ranks == self.ranks

    def publish(self, text: str) -> None:
        """Tell the other processes, for as long as torchrun lives."""
        self._store().set(_KEY, text)

    def look_up(self) -> str:
        """What rank 0 has published, waited for."""
        found: bytes = self._store().get(_KEY)
        return found.decode()

    def _store(self) -> Any:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined] # torch leaves it unexported

        is_master = self.rank == 0 and not self.agent_hosts_store
        store = TCPStore(self.host, self.port, is_master=is_master, wait_for_workers=False, timeout=PATIENCE)
        return PrefixStore(f"perfsuite/{self.name}", store)


def torchrun_of(environ: Mapping[str, str] = os.environ) -> Torchrun | None:
    """From what torchrun puts into the environment; None where it did not start this process, or it alone."""
    if "TORCHELASTIC_RUN_ID" not in environ or int(environ.get("WORLD_SIZE", "1")) < 2:
        return None
    return Torchrun(
        rank=int(environ["RANK"]),
        ranks=int(environ["WORLD_SIZE"]),
        local_rank=int(environ["LOCAL_RANK"]),
        local_ranks=int(environ["LOCAL_WORLD_SIZE"]),
        host=environ["MASTER_ADDR"],
        port=int(environ["MASTER_PORT"]),
        agent_hosts_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        name=f"{environ['TORCHELASTIC_RUN_ID']}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
    )
