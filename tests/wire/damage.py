"""What becomes of frames on a bad way."""

from hypothesis import strategies as st


def flipped(frame, data):
    """The frame with one to four of its bytes replaced; `data` is hypothesis's."""
    damaged = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    return bytes(damaged)
