"""Rendezvous of the ranks of a world; ranks that do not belong together are refused.

All ranks reach one store, at MASTER_ADDR and MASTER_PORT. It belongs to rank 0, or to torchrun's agent, which outlives
its ranks, and a process may open several worlds there, so ranks meet in numbered rounds. The first rank of a round
announces itself; all others compare themselves with it. A round ends once: every rank is there, or two do not belong
together and all that wait stop with the same message, or a later round has begun.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from mtrain.base.awake import AwakeClock
from mtrain.base.environment import RankEnvironment
from mtrain.base.errors import MachineError
from mtrain.core.ranks.party import Member, differences, explained

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_ROUND = "mtrain/round"
_FIRST, _END, _CAME, _LEFT = "first", "end", "came", "left"
_MET = "met"
_POLL_S = (0.02, 0.25)
_LONGEST_GAP_S = 1.0
"""Most seconds between two polls that count; a suspended process waits for no rank."""
_LINGER_S = 5.0
"""Seconds that the rank with the store stays for others to read why the meeting has failed."""
_ASK_S = 2.0
"""Seconds that the holder of a port may take to identify itself."""
_MOST_NAMED = 8


class MeetingPlace:
    """The store at one address, as this process uses it; kept to the end of the process.

    If it were opened again, a second world could reach the first one's store, which rank 0 is about to close.
    """

    def __init__(self, environment: RankEnvironment, timeout_s: float, environ: Mapping[str, str]) -> None:
        """Opens the store, or connects to it; the others may take `timeout_s` seconds to come.

        Raises:
            MachineError: Nothing answers there, or another program does.
        """
        self.address = f"{environment.master_addr}:{environment.master_port}"
        self._port, self._world_size = environment.master_port, environment.world_size
        self._is_of_agent = environ.get(_AGENT_STORE) == str(True)
        self._keeps_store = environment.rank == 0 and not self._is_of_agent
        self._next_round, self._port_error = 0, ""
        try:
            self._store: Store = _opened(environment, self._keeps_store, timeout_s)
        except dist.DistNetworkError as error:
            if not self._keeps_store or "EADDRINUSE" not in str(error):
                raise
            # the port may be held by ranks that can identify themselves, and that wait for this one
            self._port_error, self._keeps_store = str(error), False
            try:
                self._store = _opened(environment, False, min(timeout_s, _ASK_S))
            except (dist.DistError, MachineError):
                raise self._port_in_use("another program") from error

    def meet(self, own: Member, timeout_s: float) -> Store:
        """Waits for all ranks of this launch; returns a store for these ranks alone.

        Raises:
            MachineError: Ranks that do not belong together have met, or not all have come in time; all that wait raise
                it.
        """
        clock = AwakeClock(_LONGEST_GAP_S)
        number = max(self._next_round, self._latest())
        while True:
            self._begin(number)
            place = _Round(self._store, number, own, self.address)
            try:
                if self._port_error:
                    raise place.refused(self._port_in_use(place.holder_of_port()), own)
                if place.joined(self._is_of_agent) and place.waited(clock, timeout_s, self._latest):
                    self._next_round = number + 1
                    return PrefixStore(f"world-{number}", self._store)
            except BaseException as fault:
                place.leave()
                if isinstance(fault, MachineError) and self._keeps_store:
                    place.linger()
                raise
            number = max(number + 1, self._latest())

    def _begin(self, number: int) -> None:
        """Makes the round the latest one, unless a later one has begun."""
        while (latest := self._latest()) < number:
            self._store.compare_set(_ROUND, str(latest), str(number))

    def _latest(self) -> int:
        return self._store.add(_ROUND, 0)

    def _port_in_use(self, by: str) -> MachineError:
        return MachineError(
            f"rank 0 of {self._world_size} cannot meet the others at {self.address}: port {self._port} of this machine "
            f"is in use by {by}; set another MASTER_PORT for all ranks, or end what listens there"
        )


class _Round:
    """One round of the meeting, as one rank sees it."""

    def __init__(self, store: Store, number: int, own: Member, address: str) -> None:
        self._at, self._number, self._own, self._address = PrefixStore(f"mtrain/{number}", store), number, own, address
        self._has_given_up = False
        self._at.add(_CAME, 1)

    def joined(self, is_of_agent: bool) -> bool:
        """Joins the round; returns False if it belongs to an earlier start of this launch, whose agent kept the store.

        Raises:
            MachineError: This rank and another one do not belong together.
        """
        own = self._own
        first = Member.parsed(self._at.compare_set(_FIRST, "", own.text))
        is_same_run = not differences(first, own, elastic=True)
        has_met = self._at.check([_END]) and self._at.get(_END) == _MET.encode()
        if (
            own.follows(first)
            or (is_same_run and own.replaces(first))
            # agents restart all ranks, in any order, so that a rank that was second may now be the first
            or (is_same_run and has_met and is_of_agent)
        ):
            return self._left()
        if differences(first, own):
            raise self.refused(self._fault(explained(first, own)), first)
        found_there = self._at.compare_set(_key(own.rank), "", own.brief).decode()
        if found_there != own.brief:
            holder = Member.parsed(found_there)
            if own.follows(holder) or own.replaces(holder):
                return self._left()
            raise self.refused(self._fault(explained(replace(holder, agreed=own.agreed), own)), holder)
        return True

    def leave(self) -> None:
        """Frees the place of this rank, for a process that is restarted in its place."""
        with contextlib.suppress(dist.DistError):
            self._at.compare_set(_key(self._own.rank), self._own.brief, "")

    def waited(self, clock: AwakeClock, timeout_s: float, latest: Callable[[], int]) -> bool:
        """Waits until all ranks are there, by a clock of the seconds since this rank has come; returns False where a
        later round has begun.

        Raises:
            MachineError: A rank has found others that it does not belong to, or time is over.
        """
        pause_s, longest_s = _POLL_S
        keys = [_key(rank) for rank in range(self._own.world_size)]
        while not self._at.check([_END]):
            if latest() > self._number:
                return self._left()
            # one rank looks, and at the places themselves: a count would be wrong where a rank is interrupted
            if self._own.rank == 0 and self._at.check(keys) and all(self._at.multi_get(keys)):
                self._at.compare_set(_END, "", _MET)
                break
            if clock() > timeout_s:
                self._has_given_up = True
                self._conclude(self._late(timeout_s), self._own)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        end = self._at.get(_END).decode()
        if end != _MET:
            raise self._as_said(end)
        return True

    def refused(self, fault: MachineError, other: Member) -> MachineError:
        """Ends the round for all waiting ranks; returns the error for this rank to raise. `other` is the rank that does
        not match, or this one."""
        end = self._conclude(fault, other)
        # ranks that have met go on undisturbed
        return fault if end == _MET else self._as_said(end)

    def _conclude(self, fault: MachineError, other: Member) -> str:
        """Ends the round with a fault, unless it has ended already; returns how it ended."""
        pair = sorted((self._own, other), key=lambda member: member.rank)
        # of two ranks of one launch one prints the message; two launches have a log each
        speakers = pair[:1] if pair[0].shares_launch(pair[1]) else pair
        said = json.dumps({"text": str(fault), "speakers": [speaker.brief for speaker in speakers]})
        return self._at.compare_set(_END, "", said).decode()

    def holder_of_port(self) -> str:
        """Names the process that occupies this rank's port; for people."""
        if not self._at.check([_key(0)]) or not (text := self._at.get(_key(0))):
            return "another program"
        holder = Member.parsed(text)
        return f"{holder} of {holder.folders[0]}"

    def linger(self) -> None:
        """Waits, for a moment, until every rank has read how the round has ended, late ones included."""
        deadline = time.monotonic() + _LINGER_S
        expected = 0 if self._has_given_up else self._own.world_size
        with contextlib.suppress(dist.DistError):
            while time.monotonic() < deadline and self._at.add(_LEFT, 0) < max(expected, self._at.add(_CAME, 0)):
                time.sleep(_POLL_S[0])

    def _left(self) -> bool:
        self._at.add(_LEFT, 1)
        return False

    def _as_said(self, end: str) -> MachineError:
        content = json.loads(end)
        fault, speakers = MachineError(content["text"]), [Member.parsed(text) for text in content["speakers"]]
        speaks = any(self._own.brief == speaker.brief for speaker in speakers)
        fault.is_shown_elsewhere = not speaks and any(map(self._own.shares_launch, speakers))
        self._left()
        return fault

    def _fault(self, text: str) -> MachineError:
        return MachineError(f"ranks cannot meet at {self._address}: {text}")

    def _late(self, timeout_s: float) -> MachineError:
        own = self._own
        keys = ((rank, _key(rank)) for rank in range(own.world_size))
        missing = [rank for rank, key in keys if not self._at.check([key]) or not self._at.get(key)]
        named = ", ".join(map(str, missing[:_MOST_NAMED])) + (", ..." if len(missing) > _MOST_NAMED else "")
        return MachineError(
            f"rank {own.rank} of {own.world_size} cannot meet the others at {self._address}: {len(missing)} of them "
            f"(rank {named}) have not come within {timeout_s:g} s; start all ranks with the same MASTER_ADDR, "
            "MASTER_PORT and WORLD_SIZE, or raise train.process_group_timeout_s"
        )


def _key(rank: int) -> str:
    return f"rank-{rank}"


def _opened(environment: RankEnvironment, keeps_store: bool, timeout_s: float) -> Store:
    """Returns the store, once its keeper is there.

    Raises MachineError if another program listens there, otherwise torch's own errors.
    """
    found: list[Store | BaseException] = []

    def connect() -> None:
        try:
            found.append(
                TCPStore(
                    host_name=environment.master_addr,
                    port=environment.master_port,
                    world_size=environment.world_size,
                    is_master=keeps_store,
                    timeout=timedelta(seconds=timeout_s),
                    wait_for_workers=False,
                    multi_tenant=keeps_store,
                )
            )
        except BaseException as error:
            found.append(error)

    # torch's timeout does not end the wait for a program that accepts connections and is silent
    thread = threading.Thread(target=connect, name="connect", daemon=True)
    thread.start()
    thread.join(timeout_s + _ASK_S)
    if not found:
        raise MachineError(
            f"rank {environment.rank} of {environment.world_size} cannot meet the others at "
            f"{environment.master_addr}:{environment.master_port}: what listens there is no rank 0 and does not "
            "answer; set another MASTER_PORT for all ranks, or end what listens there"
        )
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]
