"""Requests of several cache groups, in any order, against a model that looks at every length."""

import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from examples import examples
from groups_stage import FULL, LOCAL, STATE, TRANSFER, WINDOW, prompt_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from service_stage import Clock

from pdx.errors import TierError

MODELS = [[FULL, WINDOW], [FULL, WINDOW, STATE], [WINDOW, LOCAL], [FULL, LOCAL, STATE], [STATE, FULL]]
COUNT = 6
places = st.tuples(st.integers(0, 2), st.integers(0, COUNT - 1))


class Requests(RuleBasedStateMachine):
    """One prompt: its chunks come and go in memory and in a tier, and requests ask for it."""

    def __init__(self):
        super().__init__()
        self.undo = ExitStack()
        folder = Path(tempfile.mkdtemp(prefix="pdx-test-"))
        self.undo.callback(shutil.rmtree, folder)
        self.folder, self.clock = folder, Clock()
        self.answers, self.granted, self.transfers = [], [], 0

    @initialize(model=st.sampled_from(MODELS), has_tail=st.booleans())
    def start(self, model, has_tail):
        self.prompt = self.undo.enter_context(prompt_of(self.folder, self.clock, model, COUNT, has_tail=has_tail))
        self.tier = self.prompt.below()

    def of(self, place):
        return place if place[0] < len(self.prompt.groups) else (0, place[1])

    def most(self, is_there):
        """The greatest length all of whose chunks are there."""
        lengths = range(COUNT, 0, -1)
        return next((end for end in lengths if all(is_there(place) for place in self.prompt.needs(end))), 0)

    def in_memory(self, place):
        return place in self.prompt.here()

    def anywhere(self, place):
        return self.in_memory(place) or self.prompt.key(*place) in self.tier.keys

    def settle(self):
        return self.prompt.settle(self.tier)

    # ---- chunks come and go ---------------------------------------------------------------------

    @rule()
    def all_is_stored(self):
        self.prompt.store()

    @rule(place=places)
    def one_is_forgotten(self, place):
        place = self.of(place)
        self.prompt.service.store.delete([self.prompt.key(*place)])

    @rule(place=places)
    def one_is_in_the_tier(self, place):
        place = self.of(place)
        self.tier.keys.add(self.prompt.key(*place))

    @rule(place=places)
    def one_leaves_the_tier(self, place):
        self.tier.keys.discard(self.prompt.key(*self.of(place)))

    # ---- requests -------------------------------------------------------------------------------

    @rule()
    def one_looks_at_memory(self):
        """Without a tier."""
        tiers, self.prompt.service.tiers.below = self.prompt.service.tiers.below, []
        answer = self.prompt.ask()
        self.prompt.service.tiers.below = tiers
        expected = self.most(self.in_memory)
        assert (answer.hits, answer.waiting) == (expected, False)
        assert answer.slots == self.prompt.slots(self.prompt.needs(expected))
        self.keep(answer)

    @rule(is_partial=st.booleans(), asks_room=st.booleans())
    def one_waits_for_the_tier(self, is_partial, asks_room):
        here = set(self.prompt.here())
        expected = self.most(self.anywhere)
        ask = self.prompt.ask_room if asks_room else self.prompt.ask
        answer = ask(wait_s=10.0, partial=is_partial)
        if answer is None:
            (answer,) = self.settle()
        assert (answer.hits, answer.waiting) == (expected, False)
        needs = self.prompt.needs(expected)
        assert answer.slots == self.prompt.slots(needs)
        assert set(self.prompt.here()) - here <= set(needs), "nothing is loaded that is of no use"
        granted = [divmod(at, COUNT) for at in answer.granted]
        assert len(set(granted)) == len(granted)
        assert all(chunk >= expected and place not in here for place in granted for chunk in place[1:])
        if asks_room:
            end = COUNT - self.prompt.has_tail  # who reads writes no tail
            behind = {(group, chunk) for group in range(len(self.prompt.groups)) for chunk in range(expected, end)}
            assert set(granted) == behind - here
        self.keep(answer)

    @rule(fails=st.booleans(), upto=st.integers(0, 3 * COUNT))
    def one_is_handed_over(self, fails, upto):
        """The decode leg waits for what the prefill leg writes, all of it or not."""
        self.transfers += 1
        transfer = f"{TRANSFER}-{self.transfers}"
        written = self.prompt.ask_room(part="writes", transfer=transfer, lease_s=0.0)
        tiers, self.prompt.service.tiers.below = self.prompt.service.tiers.below, []
        early = self.prompt.ask(transfer=transfer, wait_s=10.0)
        slots = written.granted_slots[:upto] if fails else written.granted_slots
        self.prompt.fill(slots)
        answers = self.prompt.turn()
        left = [slot for slot in written.granted_slots if slot not in slots]
        self.prompt.give_back(left)
        answers += self.prompt.turn()
        self.prompt.service.tiers.below = tiers
        answer = early if early is not None else answers[0]
        assert len(answers) == (early is None)
        if not fails:
            assert answer.hits == COUNT
        assert not answer.waiting
        assert [slot for slot in answer.slots] == self.prompt.slots(self.prompt.needs(answer.hits))
        self.prompt.release(answer)
        self.prompt.service.cancel(transfer, "")

    @rule()
    def loads_fail(self):
        answer = self.prompt.ask(wait_s=10.0)
        if answer is None:
            self.prompt.turn()
            self.tier.keys -= {part.key for job in self.tier.jobs for part in job.parts}
            self.tier.end(error=TierError("torn", "torn"))
            (answer,) = self.settle()
        assert answer.hits == self.most(self.in_memory)
        self.keep(answer)

    def keep(self, answer):
        self.answers.append(answer)
        self.prompt.give_back(answer.granted_slots)

    @rule()
    def one_ends(self):
        if self.answers:
            self.prompt.release(self.answers.pop(0))

    @invariant()
    def what_is_held_is_what_was_found(self):
        if not hasattr(self, "prompt"):
            return
        store = self.prompt.service.store
        held = sum(chunk.leases for chunk in store.index.slots[0].values())
        assert held == sum(len(self.prompt.needs(answer.hits)) for answer in self.answers)
        assert not self.tier.jobs
        assert len(self.prompt.service.admissions._waiting) == 0

    def teardown(self):
        for answer in self.answers:
            self.prompt.release(answer)
        self.undo.close()


Requests.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=25)
TestRequests = Requests.TestCase
