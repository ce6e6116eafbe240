"""What a bed's store publishes, over real sockets."""

import struct

from events_bed import EventsBed, key, names

from pdx.node.events.publisher import Publisher
from pdx.testing.waiting import wait_until

SHORT = 100  # from here on, keys of ends of prompts: the first block of the chunk of so much less


def blocks_of(number):
    return names(2 * number, 2 * number + 1) if number < SHORT else names(2 * (number - SHORT))


def as_ints(blocks):
    return struct.unpack(">" + "8xQ" * (len(blocks) // 16), blocks)


class Stage:
    """A bed whose events are published; the test is its control loop."""

    def __init__(self, folder, *, replay=True, slots=6, ip="", **settings):
        self.folder = folder
        self.bed = EventsBed(folder, slots=slots)
        self.settings = settings
        self.address = f"tcp://{ip}:0" if ip else f"ipc://{folder}/events.sock"
        self.replay = (f"tcp://{ip}:0" if ip else f"ipc://{folder}/replay.sock") if replay else ""
        self.start()

    def start(self):
        self.publisher = Publisher(self.bed.log, address=self.address, replay=self.replay, **self.settings)
        self.turn()

    def turn(self):
        batch = self.bed.log.turn()
        if batch is not None:
            self.publisher.put(batch)
        self.publisher.turn()

    def blocks(self):
        """Hash -> tiers, as it should be known."""
        found = {}
        records = list(self.publisher._blocks._known.items())  # it may not know names of what memory has no more …
        known = {each for each, record in records if record.blocks} | set(self.bed.store.index.whole)  # … but of this
        for each, tiers in self.bed.truth().items():
            if each in known:
                for block in as_ints(blocks_of(struct.unpack(">H", each[:2])[0])):
                    found.setdefault(block, set()).update(tiers)
        return found

    def put(self, *numbers):
        for number in numbers:
            parent = key((number % SHORT) - 1) if number % SHORT else b"root"
            blocks = blocks_of(number)
            self.bed.put(key(number), blocks=blocks, chunk_blocks=len(blocks) // 16, parent=parent, block_tokens=16)

    def close(self):
        self.publisher.close()
        self.bed.close()

    def settle(self, subscriber, what="the subscriber knows what is there"):
        """Until the subscriber has caught up."""

        def is_right():
            self.turn()
            subscriber.poll(0.01)
            return subscriber.is_complete and subscriber.index.as_dict() == self.blocks()

        wait_until(is_right, what=what, timeout_s=30.0)


def step(stage, rng):
    number = rng.randrange(8) + SHORT * (rng.random() < 0.3)
    bed = stage.bed
    tier = rng.choice([bed.disk, bed.remote])
    match rng.randrange(6):
        case 0 | 1 | 2:
            stage.put(number)
        case 3:
            bed.store.delete([key(number)])
        case 4 if key(number) in bed.store.index.whole:
            tier.put(key(number))
        case 5:
            tier.drop(key(number))
