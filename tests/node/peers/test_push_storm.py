"""Random storms against the receiving side: whatever comes in whatever order, room is never given away while somebody
may write to it, every push ends, and nothing is left."""

from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from push_stage import FakeSession, ReceivingStage, key

from pdx.errors import ProtocolError
from pdx.memory.arena import GRANULE_BYTES, round_up
from pdx.node.peers.inbound_pushes import LOOK_S
from pdx.wire.messages import Slices

LAYERS = 2
TRANSFERS = [None, "transfer-a-0123456789", "transfer-b-0123456789"]
OFTEN = ["offer", "begin", "end", "land", "let_go"]
VERBS = [*OFTEN, *OFTEN, "bad", "cancel", "silent", "bye", "tick", "later", "read", "unread"]
numbers = st.integers(0, 9)


class Storm:
    """Three peers, and what they do honestly or not. `writing` is what their channels are doing right now."""

    def __init__(self, folder):
        self.stage = ReceivingStage(folder, granules=8, peer_share=0.6)
        self.numbers = iter(range(1, 10_000))
        self.schemes = {}
        self.sessions = [self.session("a"), self.session("b"), self.session("c")]
        self.old = []  # sessions that went silent; their processes may go on writing
        self.slots = {}  # (session number, push) -> slots granted
        self.said = set()  # pushes whose sender has let go
        self.leases = []
        self.writing = {}  # (token, offset) -> the slot that was last written to

    def session(self, name):
        session = FakeSession(next(self.numbers), name)
        self.schemes[session.number] = "blind" if name == "c" else "sure"
        return session

    def listener(self, session):
        return self.stage.listeners[self.schemes[session.number]]

    def pushes(self, session):
        return range(1, self.stage.offers[session.number] + 1)

    def do(self, verb, one, two, three):
        session = self.sessions[one % 3]
        getattr(self, verb)(session, two, three)
        for session in [*self.sessions, *self.old]:
            for push in self.pushes(session):
                if (granted := session.granted(push)) is not None:
                    self.slots[session.number, push] = granted.slots

    def offer(self, session, two, three):
        self.stage.offer(
            session,
            list(range(two, two + 1 + three % 3)),
            granules=1 + three % 4,
            layers=LAYERS,
            scheme=self.schemes[session.number],
            transfer=TRANSFERS[three % 3],
            wait_s=float(two),
        )

    def pick(self, session, two, three):
        """A push with slots, and one of them."""
        found = [push for push in self.pushes(session) if self.slots.get((session.number, push))]
        if not found:
            return None, None
        push = found[two % len(found)]
        slots = self.slots[session.number, push]
        return push, slots[three % len(slots)]

    def begin(self, session, two, three):
        """A write begins: anywhere it is granted, and where nobody checks anywhere its sender has not let go."""
        push, slot = self.pick(session, two, three)
        listener = self.listener(session)
        if slot is None or (session.number, push) in self.said:
            return
        if listener.granted[session.token].get(slot.offset) == slot.nbytes and self.stage.arena.is_current(slot):
            listener.landing.add((session.token, slot.offset))
            self.writing[session.token, slot.offset] = slot

    def end(self, session, two, three):
        for token, offset in list(self.listener(session).landing):
            if token == session.token and (offset // GRANULE_BYTES + three) % 2:
                self.listener(session).landing.discard((token, offset))

    def land(self, session, two, three, *, bad=False):
        push, slot = self.pick(session, two, three)
        if slot is not None:
            self.listener(session).landing.discard((session.token, slot.offset))  # what is notified has landed
            slices = [Slices(slot.offset, slot.generation, layer, 1) for layer in range(LAYERS)][: 1 + three % 2]
            good, wrong = ([], slices) if bad else (slices, [])
            self.stage.inbound.landed(self.schemes[session.number], session.token, push, good, wrong, 10)

    def bad(self, session, two, three):
        self.land(session, two, three, bad=True)

    def let_go(self, session, two, three):
        """Its writes are over, and it will not begin another."""
        push = two % (self.stage.offers[session.number] or 1) + 1
        for slot in self.slots.get((session.number, push), ()):
            if self.schemes[session.number] == "blind":
                self.listener(session).landing.discard((session.token, slot.offset))
        self.said.add((session.number, push))
        self.stage.let_go(session, push, complete=bool(three % 2))

    def cancel(self, session, two, three):
        self.stage.inbound.cancel(TRANSFERS[1 + two % 2])

    def silent(self, session, two, three):
        if three > 6:
            self.leave(session, is_dead=False)
            self.old.append(session)

    def bye(self, session, two, three):
        if three > 6:
            self.stop_writing(session)
            self.leave(session, is_dead=True)

    def leave(self, session, *, is_dead):
        listener = self.listener(session)
        listener.granted[session.token].clear()  # as `expel` does
        self.stage.inbound.session_over(session, is_dead=is_dead)
        self.sessions[self.sessions.index(session)] = self.session(session.name)

    def stop_writing(self, session):
        listener = self.listener(session)
        listener.landing = {place for place in listener.landing if place[0] != session.token}

    def tick(self, session, two, three):
        self.stage.tick(two / 4)

    def later(self, session, two, three):
        self.stage.tick(two * 10.0)

    def read(self, session, two, three):
        found = self.stage.store.find([key(two)], 1)
        if found:
            self.leases.append(self.stage.store.lease(found[0], 1, 1e9))

    def unread(self, session, two, three):
        if self.leases:
            self.stage.store.release(self.leases.pop(two % len(self.leases)), 1)

    def check(self):
        """What always holds."""
        stage = self.stage
        for place in [place for listener in stage.listeners.values() for place in listener.landing]:
            assert stage.arena.is_current(self.writing[place]), "given away while somebody writes to it"
        pushes = self.under_way()
        assert stage.inbound.grants == {offset: push for push in pushes for offset in push.chunks}
        for offset, push in stage.inbound.grants.items():
            assert stage.store.index.slots[0][offset] is push.chunks[offset]
            assert push.chunks[offset].state in ("filling", "quarantined")
        for name in "abc":
            own = [push for push in pushes if push.session.name == name]
            held = sum(round_up(chunk.slot.nbytes) for push in own for chunk in push.chunks.values())
            account = stage.inbound.account(name)
            assert (account.pushes, account.nbytes) == (len(own), held)
        assert len(set(stage.over)) == len(stage.over), "a push ended twice"

    def under_way(self):
        return [push for session in self.stage.inbound.sessions for push in self.stage.inbound.of(session)]

    def finish(self):
        """Some leave, and writers stop, so that those that wait for room get it one after the other."""
        for lease in self.leases:
            self.stage.store.release(lease, 1)
        for session in [self.sessions[0], *self.old]:
            self.stop_writing(session)
            self.stage.inbound.session_over(session, is_dead=True)
        self.stage.tick(LOOK_S)
        while pushes := self.under_way():
            granted = [push for push in pushes if push.state != "queued"]
            assert granted, "there is room, and nobody gets it"
            for push in granted:
                self.stop_writing(push.session)
                self.stage.let_go(push.session, push.number, complete=False)
            self.stage.tick(LOOK_S)
            self.check()
        self.stage.tick(1.0)
        self.check()
        self.stage.assert_idle()
        assert not self.stage.inbound.sessions
        self.stage.tick(1000.0)
        transfers = self.stage.transfers
        assert not any(transfers.is_under_way(name) or transfers.is_given_up(name) for name in TRANSFERS[1:])
        self.stage.free_what_is_sealed()


@settings(max_examples=examples(60))
@given(events=st.lists(st.tuples(st.sampled_from(VERBS), numbers, numbers, numbers), min_size=30, max_size=80))
def test_any_order_of_events_leaves_nothing_behind(tmp_path_factory, events):
    storm = Storm(tmp_path_factory.mktemp("storm"))
    try:
        for event in events:
            try:
                storm.do(*event)
            except ProtocolError:
                continue
            storm.check()
        storm.finish()
    finally:
        storm.stage.close()
