"""Masks and rotary tables: the cache, and the limit of its memory."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nsa import tables
from nsa.attention import NSAttention
from tests.nsa.cases import model_config


def test_tables_of_many_lengths_stay_within_their_memory(monkeypatch):
    monkeypatch.setattr(tables, "LARGEST_MIB", 1)
    monkeypatch.setattr(tables, "TABLES", tables.Tables())
    built = []

    @tables.cached_table
    def table(length: int) -> torch.Tensor:
        built.append(length)
        return torch.zeros(length)

    for length in range(1000, 1200):  # 0.8 MiB together
        table(length)
    first = table(1000)
    assert first is table(1000)
    assert built == list(range(1000, 1200))
    for length in range(20_000, 20_020):  # 1.5 MiB
        table(length)
        table(1000)  # a table that is used again stays
    assert built == [*range(1000, 1200), *range(20_000, 20_020)]
    assert tables.TABLES.bytes <= 1 << 20
    table(1001)
    assert built[-1] == 1001
    kept = tables.TABLES.bytes
    assert table(10**6).numel() == 10**6
    assert tables.TABLES.bytes == kept, "a table above the limit displaces no other table"
    table(1001)
    assert built[-1] == 10**6


def test_a_table_that_two_threads_build_is_counted_once(monkeypatch):
    """The inner call is the other thread, which stores the table before the first one does."""
    monkeypatch.setattr(tables, "TABLES", tables.Tables())
    outer = iter([True])

    @tables.cached_table
    def table(length: int) -> torch.Tensor:
        if next(outer, False):
            table(length)
        return torch.zeros(length)

    assert torch.equal(table(1000), table(1000))
    assert tables.TABLES.bytes == 4000


def test_a_run_with_fake_tensors_leaves_no_table(monkeypatch):
    """Tools that estimate memory use fake tensors; later runs of this shape need real tables."""
    monkeypatch.setattr(tables, "TABLES", tables.Tables())
    config = model_config(heads=(2, 3))
    layer, x = NSAttention(config), torch.randn(1, 40, config.dim)
    expected = layer(x)
    for built in (tables.TABLES, tables.Tables()):  # with tables of real runs, and without
        monkeypatch.setattr(tables, "TABLES", built)
        kept = built.bytes
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            assert layer(fake.from_tensor(x)).shape == x.shape
        assert built.bytes == kept
        assert torch.equal(layer(x), expected)
