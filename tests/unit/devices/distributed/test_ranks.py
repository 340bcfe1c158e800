"""How ranks share what they do."""

from __future__ import annotations

from snows.devices.distributed.ranks import ALONE, Ranks


def test_jobs_are_dealt_by_what_they_cost() -> None:
    costs = [1.0, 7.0, 2.0, 3.0, 3.0, 2.0]
    owners = Ranks(size=3).dealt(costs)
    busy = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(3)]
    assert sorted(busy) == [5, 6, 7]
    assert ALONE.dealt(costs) == [0] * 6
    assert Ranks(size=3).dealt([]) == []
