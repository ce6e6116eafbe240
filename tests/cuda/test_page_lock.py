"""Host memory is page-locked piece by piece in the background; all or nothing."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref

import pytest
from fake_cuda import fake_cuda

from pdx.cuda.driver import call
from pdx.cuda.gpu import Gpu
from pdx.cuda.page_lock import PIECE_BYTES, PageLock
from pdx.testing.waiting import wait_until

MAPPED = 3  # CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP


class Host:
    """Host memory that is never touched, so that its size costs nothing; unmapped when nobody holds it."""

    def __init__(self, nbytes, protection=mmap.PROT_READ | mmap.PROT_WRITE):
        self.nbytes = nbytes
        self.map = mmap.mmap(-1, nbytes, prot=protection)
        libc = ctypes.pythonapi
        view = ctypes.py_object(self.map)
        buffer = (ctypes.c_byte * 128)()
        libc.PyObject_GetBuffer(view, buffer, 0)
        self.address = ctypes.c_void_p.from_buffer(buffer).value
        libc.PyBuffer_Release(buffer)


def lock(gpu, host, *, refusals=None, **settings):
    said = refusals if refusals is not None else []
    return PageLock(host.address, host.nbytes, gpu, anchor=host, on_refused=said.append, **settings)


def test_a_graph_that_the_engine_captures_meanwhile_is_not_spoiled(fake, gpu):
    fake.capture(is_under_way=True)
    host = Host(PIECE_BYTES)
    locked = lock(gpu, host)
    wait_until(lambda: locked.covers(0, host.nbytes) or locked.error)
    assert locked.error == ""
    locked.close()


def test_all_of_it_is_covered_in_the_end(fake, gpu):
    host = Host(2 * PIECE_BYTES + 4096)
    locked = lock(gpu, host)
    wait_until(lambda: locked.covers(0, host.nbytes))
    assert fake.host.is_registered(host.address, host.nbytes)
    assert fake.counts()["registered"] in (3, 4)  # by where the addresses lie
    assert all(start % PIECE_BYTES == 0 or start == host.address for start, _ in fake.host.spans())
    assert locked.covers(host.nbytes - 1, 1)
    assert not locked.covers(host.nbytes - 1, 2)
    assert not locked.covers(-1, 1)
    assert not locked.covers(0, -1)
    locked.close()
    locked.close()
    assert not locked.covers(0, 1)
    assert locked.error == ""
    assert fake.leftovers() == {}


def test_covered_is_what_is_registered_already(fake, gpu):
    host = Host(4 * PIECE_BYTES)
    register, allowed = fake.cuMemHostRegister, threading.Semaphore(1)
    fake.cuMemHostRegister = lambda *args: (allowed.acquire(), register(*args))[1]
    locked = lock(gpu, host)
    wait_until(lambda: locked.covers(0, 4096))
    assert not locked.covers(0, host.nbytes)  # does not block while a piece is at work
    assert not locked.covers(host.nbytes - 1, 1)
    for _ in range(5):
        allowed.release()
    wait_until(lambda: locked.covers(0, host.nbytes))
    locked.close()


@pytest.mark.parametrize("pieces", [0, 2])
def test_a_refused_piece_says_what_to_do_and_nothing_is_covered(fake, gpu, pieces):
    host, refusals = Host(4 * PIECE_BYTES), []
    fake.fail("cuMemHostRegister", after=pieces, error="OUT_OF_MEMORY", times=100)
    locked = lock(gpu, host, refusals=refusals)
    wait_until(lambda: refusals)
    assert refusals == [locked.error]
    assert f"{gpu.uuid} was refused" in locked.error
    for word in ("CUDA_ERROR_OUT_OF_MEMORY", "ulimit -l", "--ipc=host", "IPC_LOCK"):
        assert word in locked.error
    assert not locked.covers(0, 1)
    assert fake.counts()["registered"] == pieces  # kernels may be on their way there
    locked.close()
    assert fake.leftovers() == {}
    assert len(refusals) == 1


def test_its_owner_may_close_it_when_it_hears_of_the_refusal(fake, gpu):
    host, closed = Host(4 * PIECE_BYTES), []
    fake.fail("cuMemHostRegister", after=1, times=100)
    found = []

    def on_refused(text):
        wait_until(lambda: found)
        found[0].close()
        closed.append(fake.counts()["registered"])

    found.append(PageLock(host.address, host.nbytes, gpu, anchor=host, on_refused=on_refused))
    wait_until(lambda: closed)
    assert closed == [0]


def test_what_others_have_registered_is_covered_and_stays_theirs(fake, gpu):
    host = Host(4096)
    gpu.use()
    call("cuMemHostRegister", host.address, 4096, MAPPED)
    locked = lock(gpu, host)
    wait_until(lambda: locked.covers(0, 4096))
    locked.close()
    assert fake.host.is_registered(host.address, 4096)
    call("cuMemHostUnregister", host.address)


@pytest.mark.parametrize(
    ("first", "pages", "flags"),
    [(0, 1, 3), (1, 2, 3), (1, 1, 3), (0, 3, 0)],
    ids=["ends earlier", "begins later", "in the middle", "not mapped for kernels"],
)
def test_what_others_have_registered_only_in_part_is_a_refusal(fake, gpu, first, pages, flags):
    """The driver says of any overlap that the memory is registered already. A kernel that believed it would write to
    memory that is not mapped."""
    host, refusals = Host(3 * 4096), []
    gpu.use()
    theirs = host.address + first * 4096
    call("cuMemHostRegister", theirs, pages * 4096, flags)
    locked = lock(gpu, host, refusals=refusals)
    wait_until(lambda: refusals or locked.covers(0, 1))
    assert "HOST_MEMORY_ALREADY_REGISTERED" in locked.error
    assert not locked.covers(0, 1)
    locked.close()
    assert fake.host.is_registered(theirs, pages * 4096)
    call("cuMemHostUnregister", theirs)


def test_memory_that_may_only_be_read(fake, gpu):
    host, refusals = Host(4096, mmap.PROT_READ), []
    locked = lock(gpu, host, refusals=refusals)
    wait_until(lambda: refusals)
    assert "INVALID_VALUE" in refusals[0]
    locked.close()
    read_only = lock(gpu, host, is_read_only=True)
    wait_until(lambda: read_only.covers(0, 4096))
    read_only.close()


def test_the_memory_is_kept_until_nothing_is_registered(fake, gpu):
    host = Host(4096)
    gone = weakref.ref(host)
    locked = lock(gpu, host)
    wait_until(lambda: locked.covers(0, 4096))
    del host
    assert gone() is not None
    locked.close()
    wait_until(lambda: gone() is None)


def test_only_whole_pages(fake, gpu):
    for address, nbytes in ((4096 + 1, 4096), (4096, 0)):
        with pytest.raises(ValueError, match="whole pages"):
            PageLock(address, nbytes, gpu, anchor=None, on_refused=print)


@pytest.mark.parametrize("n", range(15))
def test_whatever_call_fails_what_can_be_released_is(n, caplog):
    with fake_cuda() as fake:
        gpu, host, refusals = Gpu.find("0"), Host(3 * PIECE_BYTES), []
        fake.fail(after=n)
        locked = lock(gpu, host, refusals=refusals)
        wait_until(lambda: refusals or locked.covers(0, host.nbytes))
        locked.close()
        left = fake.leftovers()
        if "cuCtxSetCurrent failed" not in caplog.text:  # without a context nothing can be released
            assert left == {} or (left == {"registered": 1} and "cuMemHostUnregister failed" in caplog.text)
