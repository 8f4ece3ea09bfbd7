"""Rendezvous of the ranks of a world; refuses ranks that do not belong together.

All ranks connect to one store at MASTER_ADDR and MASTER_PORT, which belongs to rank 0 or to torchrun's agent. Ranks
meet in numbered rounds, because an agent outlives its ranks and a process may open several worlds. The first rank of a
round announces itself, and all others compare themselves with it. A round ends in one of three ways: all ranks have
come; two ranks do not belong together, and all waiting ranks stop with the same message; or a later round has begun.
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
"""Most seconds between two polls that count as waiting; time in suspension does not count."""
_LINGER_S = 5.0
"""Seconds that the rank with the store stays so that others can read why the meeting failed."""
_ASK_S = 2.0
"""Seconds that the holder of a port has to identify itself."""
_MOST_NAMED = 8


class MeetingPlace:
    """This process's connection to the store at one address; stays open to the end of the process.

    If each world opened it anew, a second world could connect to the store of the first, which rank 0 is about to
    close.
    """

    def __init__(self, environment: RankEnvironment, timeout_s: float, environ: Mapping[str, str]) -> None:
        """Opens the store or connects to it, within `timeout_s` seconds.

        Raises:
            MachineError: Nothing answers at the address, or another program does.
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
            # the port may belong to ranks that can identify themselves and wait for this one
            self._port_error, self._keeps_store = str(error), False
            try:
                self._store = _opened(environment, False, min(timeout_s, _ASK_S))
            except (dist.DistError, MachineError):
                raise self._port_in_use("another program") from error

    def meet(self, member: Member, timeout_s: float) -> Store:
        """Waits for all ranks of this launch; returns a store for these ranks alone.

        All waiting ranks raise together.

        Raises:
            MachineError: Ranks that do not belong together have met, or some have not come in time.
        """
        clock = AwakeClock(_LONGEST_GAP_S)
        number = max(self._next_round, self._latest())
        while True:
            self._begin(number)
            meeting = _Round(self._store, number, member, self.address)
            try:
                if self._port_error:
                    raise meeting.refused(self._port_in_use(meeting.holder_of_port()), member)
                if meeting.joined(self._is_of_agent) and meeting.waited(clock, timeout_s, self._latest):
                    self._next_round = number + 1
                    return PrefixStore(f"world-{number}", self._store)
            except BaseException as fault:
                meeting.leave()
                if isinstance(fault, MachineError) and self._keeps_store:
                    meeting.linger()
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
            f"is in use by {by}; set another MASTER_PORT for all ranks, or end the program that listens there"
        )


class _Round:
    """One rank's view of one round of the meeting."""

    def __init__(self, store: Store, number: int, member: Member, address: str) -> None:
        self._at, self._number, self._member, self._address = (
            PrefixStore(f"mtrain/{number}", store),
            number,
            member,
            address,
        )
        self._has_given_up = False
        self._at.add(_CAME, 1)

    def joined(self, is_of_agent: bool) -> bool:
        """Joins the round; returns False if it belongs to an earlier start of this launch with the same store.

        Raises:
            MachineError: This rank and another rank do not belong together.
        """
        member = self._member
        first = Member.parsed(self._at.compare_set(_FIRST, "", member.text))
        is_same_run = not differences(first, member, elastic=True)
        has_met = self._at.check([_END]) and self._at.get(_END) == _MET.encode()
        if (
            member.follows(first)
            or (is_same_run and member.replaces(first))
            # an agent restarts all ranks in any order, so a rank that came second may now be the first
            or (is_same_run and has_met and is_of_agent)
        ):
            return self._left()
        if differences(first, member):
            raise self.refused(self._fault(explained(first, member)), first)
        occupant = self._at.compare_set(_key(member.rank), "", member.brief).decode()
        if occupant != member.brief:
            holder = Member.parsed(occupant)
            if member.follows(holder) or member.replaces(holder):
                return self._left()
            raise self.refused(self._fault(explained(replace(holder, agreed=member.agreed), member)), holder)
        return True

    def leave(self) -> None:
        """Removes this rank from the round, so that a restarted process can replace it."""
        with contextlib.suppress(dist.DistError):
            self._at.compare_set(_key(self._member.rank), self._member.brief, "")

    def waited(self, clock: AwakeClock, timeout_s: float, latest: Callable[[], int]) -> bool:
        """Waits until all ranks have come; returns False if a later round has begun. The clock counts from the arrival
        of this rank.

        Raises:
            MachineError: Two ranks do not belong together, or the time is over.
        """
        pause_s, longest_s = _POLL_S
        keys = [_key(rank) for rank in range(self._member.world_size)]
        while not self._at.check([_END]):
            if latest() > self._number:
                return self._left()
            # rank 0 checks the entries of all ranks; a counter would be wrong if a rank is interrupted
            if self._member.rank == 0 and self._at.check(keys) and all(self._at.multi_get(keys)):
                self._at.compare_set(_END, "", _MET)
                break
            if clock() > timeout_s:
                self._has_given_up = True
                self._conclude(self._timeout_error(timeout_s), self._member)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        end = self._at.get(_END).decode()
        if end != _MET:
            raise self._verdict_error(end)
        return True

    def refused(self, fault: MachineError, other: Member) -> MachineError:
        """Ends the round for all waiting ranks; returns the error that this rank must raise. `other` is the rank that
        does not match, or this one."""
        end = self._conclude(fault, other)
        # ranks that have met continue undisturbed
        return fault if end == _MET else self._verdict_error(end)

    def _conclude(self, fault: MachineError, other: Member) -> str:
        """Ends the round with a fault unless it has ended already; returns the end that counts."""
        pair = sorted((self._member, other), key=lambda member: member.rank)
        # in one launch one of the two ranks prints the message; two launches have separate logs
        speakers = pair[:1] if pair[0].shares_launch(pair[1]) else pair
        verdict = json.dumps({"text": str(fault), "speakers": [speaker.brief for speaker in speakers]})
        return self._at.compare_set(_END, "", verdict).decode()

    def holder_of_port(self) -> str:
        """Returns a readable name of the process that occupies this rank's port."""
        if not self._at.check([_key(0)]) or not (text := self._at.get(_key(0))):
            return "another program"
        holder = Member.parsed(text)
        return f"{holder} of {holder.folders[0]}"

    def linger(self) -> None:
        """Waits a few seconds for all ranks, including late ones, to read how the round ended."""
        deadline = time.monotonic() + _LINGER_S
        expected = 0 if self._has_given_up else self._member.world_size
        with contextlib.suppress(dist.DistError):
            while time.monotonic() < deadline and self._at.add(_LEFT, 0) < max(expected, self._at.add(_CAME, 0)):
                time.sleep(_POLL_S[0])

    def _left(self) -> bool:
        self._at.add(_LEFT, 1)
        return False

    def _verdict_error(self, end: str) -> MachineError:
        content = json.loads(end)
        fault, speakers = MachineError(content["text"]), [Member.parsed(text) for text in content["speakers"]]
        speaks = any(self._member.brief == speaker.brief for speaker in speakers)
        fault.is_shown_elsewhere = not speaks and any(map(self._member.shares_launch, speakers))
        self._left()
        return fault

    def _fault(self, text: str) -> MachineError:
        return MachineError(f"ranks cannot meet at {self._address}: {text}")

    def _timeout_error(self, timeout_s: float) -> MachineError:
        member = self._member
        keys = ((rank, _key(rank)) for rank in range(member.world_size))
        missing = [rank for rank, key in keys if not self._at.check([key]) or not self._at.get(key)]
        named = ", ".join(map(str, missing[:_MOST_NAMED])) + (", ..." if len(missing) > _MOST_NAMED else "")
        return MachineError(
            f"rank {member.rank} of {member.world_size} cannot meet the others at {self._address}: {len(missing)} of "
            f"them (rank {named}) have not come within {timeout_s:g} s; start all ranks with the same MASTER_ADDR, "
            "MASTER_PORT and WORLD_SIZE, or raise train.process_group_timeout_s"
        )


def _key(rank: int) -> str:
    return f"rank-{rank}"


def _opened(environment: RankEnvironment, keeps_store: bool, timeout_s: float) -> Store:
    """Opens the store, or connects to it once its keeper has opened it.

    Raises MachineError if another program listens at the address, otherwise torch's own errors.
    """
    outcomes: list[Store | BaseException] = []

    def connect() -> None:
        try:
            outcomes.append(
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
            outcomes.append(error)

    # torch's timeout does not apply to a program that accepts connections but does not answer
    thread = threading.Thread(target=connect, name="connect", daemon=True)
    thread.start()
    thread.join(timeout_s + _ASK_S)
    if not outcomes:
        raise MachineError(
            f"rank {environment.rank} of {environment.world_size} cannot meet the others at "
            f"{environment.master_addr}:{environment.master_port}: the program that listens there is not rank 0 and "
            "does not answer; set another MASTER_PORT for all ranks, or end that program"
        )
    if isinstance(outcomes[0], BaseException):
        raise outcomes[0]
    return outcomes[0]
