"""Messages over sockets: matched by sender and tag, of any length, both ways at once; strangers and broken ends."""

import contextlib
import functools
import itertools
import os
import resource
import socket
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from zerort.native import wire
from zerort.native.extension import kernels

pytestmark = pytest.mark.skipif(kernels is None, reason="only the compiled form has sockets")

LOOPBACK = 0x7F000001
TOKEN = bytes(range(16))
SOON = 10.0  # seconds; whoever waits so long has lost a message


class Ranks:
    """Ranks of one process that talk over the loopback."""

    def __init__(self, count):
        listeners = [socket.create_server(("127.0.0.1", 0), backlog=1024) for _ in range(count)]
        for listener in listeners:
            listener.setblocking(False)
        self.ports = [listener.getsockname()[1] for listener in listeners]
        self.sockets = [
            wire.open_sockets(
                rank,
                token=TOKEN,
                listener=listener.detach(),
                peers=[(other, LOOPBACK, port) for other, port in enumerate(self.ports) if other != rank],
            )
            for rank, listener in enumerate(listeners)
        ]
        nothing = wire.open_post(isend=0, irecv=0, testall=0, handle_nbytes=4, status_nbytes=8, comm=0, byte=0)
        self.posts = [wire.with_sockets(nothing, one) for one in self.sockets]

    def start(self, rank, sends=(), receives=(), call=0, is_greeting=False):
        return wire.start_messages(self.posts[rank], list(sends), list(receives), call=call, is_greeting=is_greeting)

    def connect(self):
        """Have each rank hear a word of each other."""
        word, rooms = np.zeros(1, np.uint8), np.zeros((len(self.posts), len(self.posts), 1), np.uint8)
        pairs = list(itertools.permutations(range(len(self.posts)), 2))
        asked = [self.start(one, [], [(other, rooms[one, other])]) for one, other in pairs]
        assert all_done(*asked, *[self.start(one, [(other, word)]) for one, other in pairs])

    def close(self):
        for one in self.sockets:
            one.close()


@pytest.fixture
def ranks():
    """Return a way to open ranks."""
    opened = []

    def open_ranks(count):
        opened.append(Ranks(count))
        return opened[-1]

    yield open_ranks
    for one in opened:
        one.close()


def all_done(*batches, within=SOON):
    """Wait for batches in turn: in one process, each needs the others to go on."""
    waits = range(int(within / 0.001) // len(batches))
    return any(sum(not batch.wait(0.001, 0.0) for batch in batches) == 0 for _ in waits)


class _Once:
    """A batch that is waited for along with others, whether it ends or not."""

    def __init__(self, batch):
        self._batch, self.is_done = batch, False

    def wait(self, seconds, busy):
        self.is_done = self.is_done or self._batch.wait(seconds, busy)
        return True


def numbers(count, seed):
    return np.random.default_rng(seed).integers(0, 256, count).astype(np.uint8)


def options_of_connections(level, option, *room):
    """Return an option of each connection of this process."""
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the directory's own
            if not os.readlink(fd).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(fd.name))) as one:
                if one.family == socket.AF_INET and not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.append(one.getsockopt(level, option, *room))
    return found


def send_buffers():
    """Return what the kernel may hold of what each connection of this process sends, in bytes."""
    return options_of_connections(socket.SOL_SOCKET, socket.SO_SNDBUF)


def test_what_connections_send_is_not_paced(ranks):
    """Where the machine's connections use BBR; elsewhere none of them does."""
    two = ranks(2)
    sent, room = numbers(1000, 0), np.zeros(1000, np.uint8)
    assert all_done(two.start(0, [(1, sent)]), two.start(1, [], [(0, room)]))

    def used():
        return [one.rstrip(b"\0") for one in options_of_connections(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)]

    with socket.socket() as plain:
        usual = plain.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
    near = b"reno" if usual == b"bbr" else usual
    assert sorted(used()) == sorted([usual, near])  # of who receives, which sends nothing, and of who sends
    two.sockets[0].go_far()
    assert used() == [usual, usual]


def test_connections_hold_no_more_than_they_are_told_those_that_are_there_and_those_to_come(ranks):
    three = ranks(3)
    given, taken = numbers(3_000_000, 0), [np.zeros(3_000_000, np.uint8) for _ in range(2)]

    def send(to):
        return all_done(three.start(0, [(to, given)]), three.start(to, [], [(0, taken[to - 1])]))

    assert three.sockets[0].round_trip() == 0.0  # to nobody yet
    assert send(1)
    assert 0.0 < three.sockets[0].round_trip() < 1.0
    three.sockets[0].limit_buffers(40_000)
    assert send_buffers().count(80_000) == 1  # the kernel doubles it, for what it needs beside the data
    assert send(1)
    assert send(2)
    assert send_buffers().count(80_000) == 2
    assert (np.stack(taken) == given).all()


@pytest.mark.parametrize("nbytes", [0, 1, 24, 65_536, 65_560, 30_000_000])
def test_messages_of_any_length_pass_both_ways_at_once(ranks, nbytes):
    two = ranks(2)
    given, taken = [numbers(nbytes, k) for k in (0, 1)], [np.zeros(nbytes, np.uint8) for _ in range(2)]
    batches = [two.start(r, [(1 - r, given[r])], [(1 - r, taken[r])]) for r in (0, 1)]
    assert all_done(*batches)
    assert (taken[0] == given[1]).all()
    assert (taken[1] == given[0]).all()


def test_messages_of_one_tag_come_in_order_and_may_be_shorter_than_their_room(ranks):
    two = ranks(2)
    sent = [numbers(length, length) for length in (5, 70_000, 1, 3)]
    rooms = [np.zeros(80_000, np.uint8) for _ in sent]
    asked = two.start(1, [], [(0, room) for room in rooms], is_greeting=True)
    assert all_done(two.start(0, [(1, one) for one in sent], is_greeting=True), asked)
    for one, room in zip(sent, rooms, strict=True):
        assert (room[: one.size] == one).all()
        assert not room[one.size :].any()


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_whoever_sleeps_is_woken_by_a_message_that_is_shorter_than_its_room(ranks, order):
    """Of two that come, whichever is last; a sleep that nothing ends takes as long as it may."""
    three, (first, last) = ranks(3), order
    short = numbers(30, 0)
    rooms = np.zeros((3, 500_000), np.uint8)
    three.connect()
    asked = three.start(0, [], [(other, rooms[other]) for other in (1, 2)], is_greeting=True)
    assert three.start(first, [(0, short)], is_greeting=True).wait(SOON, 0.0)
    assert not asked.wait(0.01, 0.0)
    say = functools.partial(three.start, last, [(0, short)], is_greeting=True)
    waker = threading.Timer(0.05, lambda: say().wait(SOON, 0.0))
    waker.start()
    began = time.monotonic()
    assert asked.wait(60.0, 0.0)
    assert time.monotonic() - began < 30.0
    waker.join()
    assert (rooms[1:, : short.size] == short).all()
    assert not rooms[1:, short.size :].any()


def test_a_short_message_is_not_held_up_by_who_waits_for_another(ranks):
    """Two batches under way: the one that was asked last stays out."""
    three = ranks(3)
    three.connect()
    rooms, sent = np.zeros((3, 100), np.uint8), numbers(100, 0)
    mine = three.start(0, [], [(1, rooms[1])])
    others = three.start(0, [], [(2, rooms[2])])
    assert all_done(mine, three.start(1, [(0, sent)]))
    assert not others.wait(0.01, 0.0)
    assert all_done(others, three.start(2, [(0, sent)]))
    assert (rooms[1:] == sent).all()


def test_whoever_waits_for_a_short_message_still_reads_what_another_batch_has_asked_for(ranks):
    """Rank 1 says its word when rank 2 has sent a long message, and rank 0 waits for the word alone."""
    three = ranks(3)
    three.connect()
    long, word = numbers(30_000_000, 0), numbers(100, 1)
    got_long, got_word = np.zeros_like(long), np.zeros_like(word)
    others, mine = three.start(0, [], [(2, got_long)]), three.start(0, [], [(1, got_word)])
    assert all_done(three.start(2, [(0, long)]), expected_not_yet := _Once(mine))
    assert not expected_not_yet.is_done
    assert all_done(three.start(1, [(0, word)]), mine, others)
    assert (got_long == long).all()
    assert (got_word == word).all()


@pytest.mark.parametrize("is_greeting", [False, True])
def test_a_long_message_is_read_while_a_late_one_of_its_batch_is_missing(ranks, is_greeting):
    three = ranks(3)
    three.connect()
    sent = numbers(8_000_000, 0)
    rooms = np.zeros((3, sent.size), np.uint8)
    asked = three.start(0, [], [(2, rooms[2]), (1, rooms[1])], is_greeting=is_greeting)
    going = three.start(2, [(0, sent)], is_greeting=is_greeting)
    assert all_done(going, expected_not_yet := _Once(asked))  # it has gone: somebody has read it
    assert not expected_not_yet.is_done
    assert all_done(three.start(1, [(0, sent)], is_greeting=is_greeting), asked)
    assert (rooms[1:] == sent).all()


def test_a_message_that_nobody_has_asked_for_waits_until_somebody_does(ranks):
    two = ranks(2)
    early, late = numbers(100, 1), numbers(2_000_000, 2)
    sending = [two.start(0, [(1, late)]), two.start(0, [(1, early)], is_greeting=True)]
    got_early, got_late = np.zeros_like(early), np.zeros_like(late)
    asked = two.start(1, [], [(0, got_early)], is_greeting=True)
    assert not all_done(asked, *sending, within=0.1)  # behind the long one, for which there is no room yet
    assert all_done(asked, two.start(1, [], [(0, got_late)]), *sending)
    assert (got_early == early).all()
    assert (got_late == late).all()


@pytest.mark.parametrize("first", [0, 2**32 - 3], ids=["from 0", "past 2^32"])
def test_data_of_a_call_that_is_over_is_nobodys_and_that_of_the_next_waits(ranks, first):
    """Rank 0 makes a call that rank 1 does not make; both go on with the next, of which rank 0 is first again."""
    two = ranks(2)
    given = [numbers(length, length) for length in (300_000, 70_000, 0, 5)]
    for step, sent in enumerate(given):
        over, now, coming = (first + 3 * step + k for k in range(3))
        unwanted = two.start(0, [(1, np.zeros(sent.size, np.uint8))] * 3, call=over)
        sending, room = two.start(0, [(1, sent)], call=now), np.full(sent.size, 7, np.uint8)
        assert all_done(unwanted, sending, two.start(1, [], [(0, room)], call=now))
        assert (room == sent).all()
        early, word, room[:] = two.start(0, [(1, sent)], call=coming), np.zeros(4, np.uint8), 7
        greeting = two.start(1, [], [(0, word)], call=now, is_greeting=True)
        said = two.start(0, [(1, numbers(4, step))], call=coming, is_greeting=True)
        assert not all_done(greeting, early, said, within=0.05)  # it lies behind what nobody has asked for yet
        assert all_done(early, said, greeting, two.start(1, [], [(0, room)], call=coming))
        assert (room == sent).all()
        assert (word == numbers(4, step)).all()


def test_numbers_of_calls_that_cannot_be_are_errors(ranks):
    two = ranks(2)
    room = np.zeros(1, np.uint8)
    sending = two.start(0, [(1, room)], call=7)
    asked = two.start(1, [], [(0, room)], call=5)
    with pytest.raises(RuntimeError, match="data of call 5 or the next from rank 0, got data of the call 2 later"):
        all_done(sending, asked)
    with pytest.raises(RuntimeError, match=r"numbers of calls that grow, got 6 after 7\..*please report"):
        two.start(0, call=6)


def test_every_rank_hears_all_others(ranks):
    many = 5
    all_ = ranks(many)
    given, taken = numbers(many * many * 1000, 0).reshape(many, many, 1000), np.zeros((many, many, 1000), np.uint8)
    others = [[other for other in range(many) if other != r] for r in range(many)]
    batches = [
        all_.start(
            r, [(other, given[r, other]) for other in others[r]], [(other, taken[r, other]) for other in others[r]]
        )
        for r in range(many)
    ]
    assert all_done(*batches)
    for r, other in itertools.permutations(range(many), 2):
        assert (taken[r, other] == given[other, r]).all()


@pytest.mark.parametrize(
    "hello",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n" + bytes(20),
        bytes(16) + struct.pack("ii", 0, 1),
        TOKEN + struct.pack("ii", 7, 1),
        TOKEN + struct.pack("ii", 0, 2),  # for another rank, at the same address of another network
    ],
)
def test_who_does_not_know_the_token_or_is_no_rank_is_not_heard(ranks, hello):
    two = ranks(2)
    with socket.create_connection(("127.0.0.1", two.ports[1])) as stranger:
        stranger.sendall(hello + struct.pack("Q", 4 << 33) + b"evil")
        room = np.zeros(4, np.uint8)
        asked = two.start(1, [], [(0, room)])
        assert not all_done(asked, within=0.05)
        assert all_done(asked, two.start(0, [(1, np.frombuffer(b"good", np.uint8))]))
        assert room.tobytes() == b"good"


def test_a_connection_that_breaks_ends_no_wait_early(ranks):
    two = ranks(2)
    first = np.zeros(1, np.uint8)
    assert all_done(two.start(0, [(1, first)]), two.start(1, [], [(0, first)]))
    two.sockets[0].close()
    assert not two.start(1, [], [(0, first)]).wait(0.05, 0.0)
    long = np.zeros(20_000_000, np.uint8)
    assert not two.start(1, [(0, long)]).wait(0.05, 0.0)


def test_a_message_longer_than_its_room_is_an_error(ranks):
    two = ranks(2)
    sending, asked = two.start(0, [(1, np.zeros(9, np.uint8))]), two.start(1, [], [(0, np.zeros(8, np.uint8))])
    with pytest.raises(RuntimeError, match="fits into its room"):
        all_done(sending, asked)


def test_ranks_that_say_late_who_they_are_are_no_strangers(ranks):
    many, (soft, hard) = 290, resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000 or int(Path("/proc/sys/net/core/somaxconn").read_text()) < many:
        pytest.skip("so many connections cannot be had here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    all_ = ranks(many + 1)
    given, taken = np.arange(many, dtype=np.uint16), np.zeros(many, np.uint16)
    sending = [all_.start(r, [(many, given[r : r + 1])]) for r in range(many)]  # connect, and say nothing yet
    asked = all_.start(many, [], [(r, taken[r : r + 1]) for r in range(many)])
    assert not asked.wait(0.05, 0.0)
    assert all_done(*sending)
    assert asked.wait(SOON, 0.0)
    assert (taken == given).all()
