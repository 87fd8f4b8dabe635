"""The transfer pool: limits, order, cancelling and failures, with a connector that copies only when told to."""

import threading
from collections.abc import Sequence

import pytest
from typing_extensions import override

from backends.kv_transfer.base import KVConnector
from backends.kv_transfer.pool import LayerwiseCopies, Part, Transfer, TransferPool

DEADLINE = 10.0


class ScriptedConnector(KVConnector):
    """Records copies; each waits for its turn while `gate` is closed."""

    def __init__(self, num_layers: int = 3) -> None:
        self._num_layers = num_layers
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)
        self.copies: list[tuple[int, int, int]] = []
        self.fail = False
        self.closed = False

    @property
    @override
    def num_layers(self) -> int:
        return self._num_layers

    @override
    def save_kv_layer(
        self, layer: int, source_block_ids: Sequence[int], target_block_ids: Sequence[int], start: int, stop: int
    ) -> int:
        self.entered.release()
        assert self.gate.wait(DEADLINE)
        if self.fail:
            raise OSError("the wire is cut")
        self.copies.append((layer, start, stop))
        return stop - start

    @override
    def close(self) -> None:
        self.closed = True


def part(transfer: Transfer, start: int = 0, stop: int = 4) -> Part:
    return Part(transfer, [0], start, stop)


def wait_entered(connector: ScriptedConnector) -> None:
    assert connector.entered.acquire(timeout=DEADLINE)


@pytest.fixture
def connector() -> ScriptedConnector:
    return ScriptedConnector()


def test_computing_waits_while_as_many_layers_as_allowed_are_in_flight(connector: ScriptedConnector):
    pool, transfer = TransferPool(connector, max_in_flight=2), Transfer([0])
    pool.submit_computed([0], [part(transfer)])
    pool.submit_computed([1], [part(transfer)])
    third = threading.Thread(target=pool.submit_computed, args=([2], [part(transfer)]), daemon=True)
    third.start()

    wait_entered(connector)
    third.join(0.05)
    assert third.is_alive()
    connector.gate.set()
    third.join(DEADLINE)
    assert not third.is_alive()

    pool.wait_done(transfer)
    assert pool.is_done(transfer)
    assert sorted(layer for layer, _, _ in connector.copies) == [0, 1, 2]
    assert transfer.num_bytes == pool.transferred_bytes == 12
    pool.close()


def test_a_layer_just_computed_goes_before_what_was_cached(connector: ScriptedConnector):
    pool, transfer = TransferPool(connector, max_in_flight=1), Transfer([0])
    pool.submit_all_layers(part(transfer, 0, 8))
    wait_entered(connector)  # layer 0 of the cached part is being copied by the only thread
    pool.submit_computed([0], [part(transfer, 8, 12)])
    connector.gate.set()
    pool.wait_done(transfer)

    assert connector.copies == [(0, 0, 8), (0, 8, 12), (1, 0, 8), (2, 0, 8)]
    pool.close()


def test_cancelling_drops_what_waits_and_sees_what_runs_to_its_end(connector: ScriptedConnector):
    pool, gone, kept = TransferPool(connector, max_in_flight=1), Transfer([0]), Transfer([1])
    pool.submit_all_layers(part(gone, 0, 4))
    wait_entered(connector)
    pool.submit_all_layers(part(kept, 0, 8))
    canceller = threading.Thread(target=pool.cancel, args=(gone,), daemon=True)
    canceller.start()
    canceller.join(0.05)
    assert canceller.is_alive()  # one copy still runs
    connector.gate.set()
    canceller.join(DEADLINE)
    assert not canceller.is_alive()
    pool.wait_done(kept)

    assert connector.copies == [(0, 0, 4), (0, 0, 8), (1, 0, 8), (2, 0, 8)]
    assert gone.num_pending == 0
    pool.close()


def test_a_failed_copy_is_kept_for_the_engine_and_stops_the_rest(connector: ScriptedConnector):
    pool, transfer = TransferPool(connector, max_in_flight=1), Transfer([0])
    connector.fail = True
    connector.gate.set()
    pool.submit_all_layers(part(transfer))
    pool.wait_done(transfer)

    assert str(transfer.error) == "the wire is cut"
    assert connector.entered.acquire(timeout=0)
    assert not connector.entered.acquire(timeout=0)
    pool.close()


def test_closing_drops_what_waits_and_lets_go_of_the_peer(connector: ScriptedConnector):
    pool, transfer = TransferPool(connector, max_in_flight=1), Transfer([0])
    pool.submit_all_layers(part(transfer))
    wait_entered(connector)
    closer = threading.Thread(target=pool.close, daemon=True)
    closer.start()
    connector.gate.set()
    closer.join(DEADLINE)

    assert connector.closed
    assert len(connector.copies) <= 2


def test_the_engine_is_woken_when_a_request_is_through(connector: ScriptedConnector):
    woken = threading.Semaphore(0)
    pool, transfer = TransferPool(connector, max_in_flight=1, wake=woken.release), Transfer([0])
    pool.submit_all_layers(part(transfer))
    connector.gate.set()

    assert woken.acquire(timeout=DEADLINE)
    assert pool.is_done(transfer)
    pool.close()
    assert not woken.acquire(timeout=0)


def test_a_copy_waits_for_what_was_queued_to_be_computed_before_it():
    """On a device a layer's call returns before its KV is there."""

    class Device(ScriptedConnector):
        def __init__(self) -> None:
            super().__init__()
            self.num_marks = 0
            self.done: list[str] = []

        @override
        def mark(self) -> object:
            self.num_marks += 1
            return self.num_marks

        @override
        def wait_for(self, mark: object) -> None:
            self.done.append(f"computed {mark}")

        @override
        def save_kv_layer(
            self, layer: int, source_block_ids: Sequence[int], target_block_ids: Sequence[int], start: int, stop: int
        ) -> int:
            self.done.append(f"copied {layer}")
            return stop - start

    device = Device()
    pool, transfer = TransferPool(device, max_in_flight=1), Transfer([0])
    pool.submit_computed([0], [part(transfer)])
    pool.submit_computed([1], [part(transfer)])
    pool.wait_done(transfer)

    assert device.done == ["computed 1", "copied 0", "computed 2", "copied 1"]
    pool.close()


def test_seconds_are_of_the_copies_alone():
    ticks = iter([1.0, 2.0, 5.0, 7.0])
    connector = ScriptedConnector(num_layers=2)
    connector.gate.set()
    pool, transfer = TransferPool(connector, max_in_flight=1, clock=lambda: next(ticks)), Transfer([0])
    pool.submit_all_layers(part(transfer))
    pool.wait_done(transfer)

    assert transfer.seconds() == 3.0
    assert transfer.overlapped_seconds((0.0, 6.0)) == 2.0
    pool.close()


@pytest.mark.parametrize(
    ("max_in_flight", "handed_over"), [(1, [[0], [1], [2], [3], [4], [5], [6]]), (4, [[0, 1, 2, 3], [4, 5], [6]])]
)
def test_layers_are_handed_over_together_and_the_last_ones_alone(max_in_flight: int, handed_over: list[list[int]]):
    connector = ScriptedConnector(num_layers=7)
    connector.gate.set()
    pool, seen = RecordingPool(connector, max_in_flight=max_in_flight), Transfer([0])
    copies = LayerwiseCopies({pool: [part(seen)]})
    for layer in range(7):
        copies(layer)
    pool.wait_done(seen)
    pool.close()

    assert pool.submitted == handed_over
    assert [layer for layer, _, _ in sorted(connector.copies)] == list(range(7))


class RecordingPool(TransferPool):
    submitted: list[list[int]]

    @override
    def submit_computed(self, layers: Sequence[int], parts: Sequence[Part]) -> None:
        self.__dict__.setdefault("submitted", []).append(list(layers))
        super().submit_computed(layers, parts)
