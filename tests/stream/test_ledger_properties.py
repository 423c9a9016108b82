"""The control plane under arbitrary histories: exactly once per consumer, nothing lost, groups whole."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from roll_flash.stream.ledger import Ledger
from roll_flash.stream.ledger_state import ledger_state, restore_ledger
from roll_flash.stream.rows import Claim, Consumer, RowInfo
from roll_flash.stream.samplers import Sequential, TokenBalanced

CONSUMERS = (
    Consumer("judge", ("tokens",), Sequential(3)),
    Consumer("learner", ("tokens", "score"), TokenBalanced(20, whole_groups=True)),
    Consumer("audit", ("tokens", "score"), Sequential(2), in_order=True),
)
PARTITIONS = (0, 1)
names = st.sampled_from([consumer.name for consumer in CONSUMERS])


def new_ledger() -> Ledger:
    return Ledger(CONSUMERS, capacity_rows=30, capacity_bytes=3000, smallest_group=2)


class Histories(RuleBasedStateMachine):
    """Plays writers, a judge that writes `score`, a learner that wants whole groups, and an audit in order of puts."""

    reserved = Bundle("reserved")
    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = new_ledger()
        self.groups = 0
        self.sealed: set[int] = set()
        self.arrived: set[int] = set()
        self.withdrawn: set[int] = set()
        self.consumed: Counter[tuple[str, int]] = Counter()
        self.freed: Counter[int] = Counter()
        self.scored: set[int] = set()
        self.generation = 0
        self.gone: set[int] = set()
        self.members: dict[str, list[int]] = {}
        self.sizes: dict[str, int | None] = {}
        self.partition_of: dict[str, int] = {}

    @rule(
        target=reserved,
        members=st.lists(st.integers(1, 12), min_size=1, max_size=4),
        missing=st.integers(0, 2),
        partition=st.sampled_from(PARTITIONS),
        alone=st.booleans(),
        told=st.booleans(),
        arrives=st.integers(0, 4),
    )
    def put(self, members: list[int], missing: int, partition: int, alone: bool, told: bool, arrives: int) -> Any:
        """A group of which `missing` members never come, or rows on their own; sometimes the size is never told. The
        data of the first `arrives` is there at once."""
        if partition in self.sealed:
            return multiple()
        self.groups += 1
        group = None if alone else f"g{self.groups}"
        size = None if alone or not told else len(members) + missing
        infos = [RowInfo(tokens, 10 * tokens, group, size, partition) for tokens in members]
        if not self.ledger.has_room(infos):
            assert self.ledger.rows
            return multiple()
        row_ids = self.ledger.reserve(infos)
        if group is not None:
            self.members[group], self.sizes[group], self.partition_of[group] = row_ids, size, partition
        self.ledger.arrive(row_ids[:arrives], ["tokens"])
        self.arrived.update(row_ids[:arrives])
        return multiple(*((self.generation, row_id) for row_id in row_ids[arrives:]))

    @rule(handle=consumes(reserved))
    def arrive(self, handle: tuple[int, int]) -> None:
        if handle[0] == self.generation:
            self.ledger.arrive([handle[1]], ["tokens"])
            self.arrived.add(handle[1])

    @rule(handle=consumes(reserved))
    def withdraw(self, handle: tuple[int, int]) -> None:
        if handle[0] == self.generation:
            self.ledger.withdraw([handle[1]])
            self.withdrawn.add(handle[1])

    @rule(target=claims, consumer=names, partition=st.sampled_from([*PARTITIONS, None]))
    def claim(self, consumer: str, partition: int | None) -> Any:
        waiting = list(self.ledger.queues[consumer]._waiting.get(partition or 0, ()))
        claim = self.ledger.claim(consumer, partition)
        if claim is None:
            return multiple()
        self.check_claim(claim, waiting)
        return (self.generation, claim)

    def check_claim(self, claim: Claim, waiting: list[Any] | None = None) -> None:
        assert claim.row_ids
        for row_id in claim.row_ids:
            assert row_id in self.arrived - self.gone
            assert self.consumed[claim.consumer, row_id] == 0, "every consumer gets a row once"
            assert self.ledger.rows[row_id].doomed is None
            assert claim.partition in (None, self.ledger.rows[row_id].info.partition)
        if claim.consumer == "learner":
            for group in {claim.groups[row_id] for row_id in claim.row_ids}:
                members = [row_id for row_id in claim.row_ids if claim.groups[row_id] == group]
                assert sorted(members) == self.members_left(group), "groups are neither mixed nor split"
                assert set(members) <= self.scored
        if claim.consumer == "audit" and claim.partition is not None and waiting is not None:
            assert list(claim.row_ids) == waiting[: len(claim.row_ids)], "in the order of puts"

    def members_left(self, group: str) -> list[int]:
        """By the model: the group's rows that came and were not dropped; none while more of it may come."""
        rows = self.members.get(group)
        if rows is None:
            return [int(group.removeprefix("row "))]
        over = self.partition_of[group] in self.sealed or self.ledger.is_closed
        told = self.sizes[group] is not None and self.sizes[group] == len(rows)
        pending = [row_id for row_id in rows if row_id not in self.arrived | self.withdrawn]
        assert not pending
        assert over or (told and set(rows) <= self.arrived), "a group is handed out when it is complete"
        return [row_id for row_id in rows if row_id in self.arrived - self.gone]

    @rule(handle=consumes(claims), how=st.sampled_from(["consumed", "consumed", "consumed", "returned", "dropped"]))
    def settle(self, handle: tuple[int, Claim], how: str) -> None:
        if handle[0] == self.generation:
            self.settle_claim(handle[1], how)

    def settle_claim(self, claim: Claim, how: str) -> None:
        if how == "consumed" and claim.consumer == "judge":
            new = [row_id for row_id in claim.row_ids if row_id not in self.scored]
            self.ledger.written(new, ["score"], [8] * len(new))
            self.scored.update(new)
        if how == "consumed":
            self.consumed.update((claim.consumer, row_id) for row_id in claim.row_ids)
        if how == "dropped":
            self.gone.update(claim.row_ids)
        reason = "judged_bad" if how == "dropped" else None
        self.ledger.settle(claim.claim_id, consumed=how == "consumed", dropped_for=reason)

    @rule()
    def judge(self) -> None:
        """The judge does one batch without a break."""
        if (claim := self.ledger.claim("judge")) is not None:
            self.check_claim(claim)
            self.settle_claim(claim, "consumed")

    @precondition(lambda self: self.ledger.rows)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        row_id = data.draw(st.sampled_from(sorted(self.ledger.rows)))
        self.ledger.drop([row_id], "unlucky")
        if row_id in self.arrived:
            self.gone.add(row_id)

    @precondition(lambda self: self.ledger.next_row > 12)
    @rule(partition=st.sampled_from(PARTITIONS))
    def drop_partition(self, partition: int) -> None:
        rows = self.ledger.rows.items()
        hit = {row_id for row_id, row in rows if row.info.partition == partition and row.has_arrived}
        self.ledger.drop_partition(partition, "abandoned")
        self.sealed.add(partition)
        self.gone |= hit
        assert all(self.ledger.rows[row_id].claimed_by for row_id in hit & self.ledger.rows.keys())

    @precondition(lambda self: self.ledger.next_row > 12)
    @rule(partition=st.sampled_from(PARTITIONS))
    def seal(self, partition: int) -> None:
        self.ledger.seal(partition)
        self.sealed.add(partition)

    @precondition(lambda self: self.ledger.next_row > 4 * (self.generation + 1))
    @rule()
    def restart(self) -> None:
        """A checkpoint is taken, the process dies, and a new one goes on: claims and what had not arrived are gone."""
        self.collect_freed()
        never_arrived = [row_id for row_id, row in self.ledger.rows.items() if not row.has_arrived]
        doomed = [row_id for row_id, row in self.ledger.rows.items() if row.has_arrived and row.doomed]
        self.freed.update([*never_arrived, *doomed])
        self.withdrawn.update(never_arrived)
        state = json.loads(json.dumps(ledger_state(self.ledger)))
        self.ledger = new_ledger()
        restore_ledger(self.ledger, state)
        self.generation += 1

    @invariant()
    def books_balance(self) -> None:
        assert self.ledger.is_balanced()
        assert self.ledger.books["produced"] == len(self.arrived)
        assert self.ledger.num_waiting == sum(row.has_arrived for row in self.ledger.rows.values())
        assert self.ledger.held_bytes == sum(row.info.num_bytes for row in self.ledger.rows.values())

    @invariant()
    def collect_freed(self) -> None:
        self.freed.update(self.ledger.take_freed())
        assert not set(self.freed) & set(self.ledger.rows)
        assert all(count == 1 for count in self.freed.values()), "a row is freed once"

    def teardown(self) -> None:
        """When all are done nothing is left: every row was consumed by all, or dropped for a reason, or withdrawn."""
        ledger = self.ledger
        for claim_id in list(ledger.claims):
            ledger.settle(claim_id, consumed=False)
        never_arrived = [row_id for row_id, row in ledger.rows.items() if not row.has_arrived]
        ledger.withdraw(never_arrived)
        self.withdrawn.update(never_arrived)
        ledger.seal()
        for consumer in ("judge", "learner", "audit"):
            while (claim := ledger.claim(consumer)) is not None:
                self.check_claim(claim)
                self.settle_claim(claim, "consumed")
            assert ledger.is_exhausted(consumer)
        self.collect_freed()
        assert not ledger.rows
        assert not ledger.groups
        assert not ledger.claims
        assert set(self.freed) == set(range(ledger.next_row))
        by_all = {row_id for row_id in self.arrived if all(self.consumed[c.name, row_id] == 1 for c in CONSUMERS)}
        assert ledger.books["consumed"] == len(by_all)
        assert ledger.num_dropped == len(self.arrived) - len(by_all)


Histories.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestEveryHistory = Histories.TestCase
