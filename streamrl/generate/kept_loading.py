"""Has one SGLang server load a version from memory of this host, by the loader that runs inside it.

    loader there? ──▶ requests wait ──▶ begin ──▶ the plan, a rank each ──▶ end ──▶ receipts ──▶ its name ──▶ go on

The server's weights get the version's name when every rank's receipt says that it has loaded it; SGLang's own
answer only says that the loader came back.
"""

from __future__ import annotations

import base64
import contextlib
import pickle
import types
from collections.abc import Sequence

import msgspec

from streamrl.engine.client import EngineClient, EngineError
from streamrl.engine.kept_memory import Place
from streamrl.engine.load_plan import LOADER, BucketLayout, LoadPlan, Receipts
from streamrl.generate.weight_update import WeightUpdate
from streamrl.publish.transport import PublishError, end_open_update
from streamrl.types import PolicyVersion


class KeptLoading:
    """The way into one server."""

    def __init__(self, client: EngineClient, update: WeightUpdate, timeout: float, ranks: int) -> None:
        """`timeout`: seconds that one call may take. `ranks` of the server."""
        self._client = client
        self._update = update
        self._timeout = timeout
        self._ranks = ranks
        self._has_loader = False

    @property
    def whole(self) -> bool:
        return self._update.whole

    async def load(self, version: PolicyVersion, place: Place, buckets: Sequence[BucketLayout], verify: bool) -> None:
        """Make the server generate with what lies at `place`. Raises EngineError or PublishError."""
        await self._check_loader()
        with contextlib.closing(Receipts(self._ranks)) as receipts:
            plan = LoadPlan(
                place=place,
                buckets=tuple(buckets),
                verify=verify,
                receipt=receipts.path,
                token=receipts.token,
                rank=0,
            )
            async with self._update.waiting():
                try:
                    await self._load(version, plan, receipts)
                except EngineError:
                    await end_open_update(self._client, self._timeout)
                    raise

    async def _check_loader(self) -> None:
        """A server that does not know the loader would end when it is asked to use it."""
        if self._has_loader:
            return
        loaders = (await self._client.server_info(self._timeout)).get("custom_weight_loader") or ()
        if LOADER not in loaders:
            raise PublishError(
                f"{self._client.address} was started without --custom-weight-loader {LOADER}, which the transports "
                "memory and delta need; where it cannot import streamrl: publish.transport=broadcast or disk"
            )
        self._has_loader = True

    async def _load(self, version: PolicyVersion, plan: LoadPlan, receipts: Receipts) -> None:
        former = (await self._client.model_info(self._timeout)).weight_version
        await self._client.begin_weight_update(self._timeout)
        was_whole, self._update.whole = self._update.whole, False
        await self._client.update_from_tensor(
            [_payload(msgspec.structs.replace(plan, rank=rank)) for rank in range(self._ranks)],
            load_format=LOADER,
            version=f"{version}-partial",  # no policy version, which nobody accepts
            flush_cache=self._update.flush_cache,
            timeout=self._timeout,
        )
        await self._client.end_weight_update(self._timeout)
        faults, touched = self._read(receipts)
        if not faults:
            await self._client.update_weight_version(str(version), self._timeout)
            self._update.whole = True
            return
        if was_whole and not touched:
            await self._client.update_weight_version(former, self._timeout)
            self._update.whole = True
        raise EngineError(self._client.address, "/update_weights_from_tensor", 200, "; ".join(faults))

    def _read(self, receipts: Receipts) -> tuple[list[str], bool]:
        """What went wrong, and whether any rank's weights may have been touched."""
        faults, touched = [], False
        for rank, receipt in enumerate(receipts.read()):
            if receipt is None:
                faults.append(
                    f"rank {rank} has left no receipt: memory needs worker and server on one host, in one PID "
                    "namespace, under one user"
                )
            elif receipt.status != "loaded":
                faults.append(f"rank {rank}, {receipt.status}: {receipt.reason}")
            touched |= receipt is None or receipt.status in ("loaded", "failed")
        return faults, touched


def _payload(plan: LoadPlan) -> str:
    """What SGLang takes for one rank's tensors: a name, and something whose `.to(device)` does no harm.

    Of nothing but what its unpickler lets through, and without torch.
    """
    named = [(msgspec.json.encode(plan).decode(), types.SimpleNamespace(to=str))]
    return base64.b64encode(pickle.dumps(named)).decode()
