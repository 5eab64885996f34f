"""The weights with which the ranks start a fit: those of rank 0."""

from collections.abc import Collection

from hvdx.comm import Comm
from hvdx.keras.adapters.rank_local import declared, rank_local_ids
from hvdx.keras.fit import replicas
from hvdx.keras.fit.attachment import Attachment
from hvdx.keras.fit.part import Part
from hvdx.keras.fit.sync_callback import SyncCallback
from hvdx.keras.types import Logs


class Start(Part):
    """Broadcast weights and optimiser state of rank 0, also to layers that are built in the first step."""

    def __init__(self, comm: Comm, sync: SyncCallback, attachment: Attachment):
        super().__init__()
        self._comm, self._sync, self._attachment = comm, sync, attachment
        self._weights = 0

    def on_train_begin(self, logs: Logs = None) -> None:
        self._weights = 0

    def agree(self, offered: list[object]) -> None:
        """Broadcast the state of rank 0, to which `Checkpoint` may have restored it before."""
        if self.model.built:
            # Rank-local state from an earlier fit or a checkpoint is not broadcast, so that a rank's momenta match its
            # residual. In mid-epoch, non-trainable weights are rank-local too.
            within = bool(self._sync.steps_done)
            self._broadcast(rank_local_ids(self.model, within, of=lambda _, adapter: adapter.has_state))

    def end_first_step(self) -> None:
        """Broadcast again if the first step has built layers."""
        if len(self.model.weights) > self._weights:
            for adapter in self._attachment.adapters:
                adapter.prepare_broadcast()
            self._broadcast({id(v) for part in declared(self.model) for v in part})

    def _broadcast(self, excluded: Collection[int]) -> None:
        replicas.broadcast_state(self.model, 0, self._comm, excluded)
        self._weights = len(self.model.weights)
