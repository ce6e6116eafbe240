"""A node's service on a clock of the test, with a fake tier below, whose client sends hints."""

from service_stage import CHUNKS, Below, attach, keys, serving, there

from pdx.memory.arena import GRANULE_BYTES
from pdx.wire.hints import Hints, tenant
from pdx.wire.messages import Admit, Fill, Release
from pdx.wire.verbs import Advise

A, B = tenant("a"), tenant("b")


class Bed:
    """A service, one client of it, and its clock."""

    def __init__(self, stack, place, *, has_tier=True, **config):
        self.now = 1000.0
        self.is_slow = False  # the tier below: it moves nothing until `settle`
        settings = {"tenant_lease_share": 0.125, "pin_share": 0.25, **config}  # 32 chunks, and 64
        self.service = stack.enter_context(serving(place, lambda: self.now, **settings))
        self.below = Below(self.service.copies)
        if has_tier:
            self.service.tiers.below.append([self.below])
        self.session = self.attach("client")

    def attach(self, name, kind="client"):
        return attach(self.service, name, kind, engine="" if kind == "client" else "engine")

    def ask(self, body, session=None):
        answer = self.service.handle(session or self.session, body)
        self.service.turn()
        while self.below.jobs and not self.is_slow:
            self.below.end()
            self.service.turn()
        return answer

    def request(self, numbers, hints=Hints(""), *, is_done=True, **fields):  # noqa: B008
        """A request that writes what is missing and reads what is there; what became of each field of its hints."""
        fields = {"lease_s": 5.0, "partial": True, **fields}
        answer = self.ask(Admit(keys(numbers), GRANULE_BYTES, 1, hints=hints, **fields))
        if is_done:
            self.end(answer)
        return told(answer)

    def end(self, answer):
        self.ask(Fill(answer.granted_slots, 0, 1, True))
        if answer.lease:
            self.ask(Release(answer.lease))

    def advise(self, hints, numbers=()):
        return told(self.ask(Advise(hints, keys(numbers))))

    def there(self, numbers):
        return there(self.service, numbers)

    def flood(self, first=5000, count=CHUNKS):
        """Others want all the room there is."""
        for number in range(first, first + count, 8):
            self.request(range(number, min(number + 8, first + count)))

    def settle(self):
        """What is under way with the tier below is over."""
        for _ in range(10):
            self.service.tick()
            self.service.turn()
            self.below.end()
            self.service.turn()

    def wait(self, seconds):
        self.now += seconds
        self.service.tick()
        self.service.turn()


def told(answer):
    return {verdict.field: (verdict.outcome, verdict.value, verdict.text) for verdict in answer.verdicts}


def outcomes(verdicts):
    return {field: outcome for field, (outcome, _, _) in verdicts.items()}
