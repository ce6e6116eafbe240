"""Which engines get a request's two legs: load first, then one node rather than two, then turns."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdx.proxy import router
from pdx.proxy.engines import Engine
from pdx.proxy.router import Pair, decoder, pair, serving


def engine(url, prefills=False, decodes=False, named=False, **told):
    return Engine(url=url, name=url, prefills=prefills, decodes=decodes, named=named, **told)


def Candidate(engine, load=0, last_used=0, suspect=False, cost=None):
    """Whose load decides for both legs, where nothing else is said."""
    return router.Candidate(engine, load, last_used, suspect, load if cost is None else cost)


P, Q = engine("p", prefills=True), engine("q", prefills=True)
D, E = engine("d", decodes=True), engine("e", decodes=True)
BOTH = engine("both", prefills=True, decodes=True)
P1, P2 = engine("p1", prefills=True, node="one"), engine("p2", prefills=True, node="two")
D1, D2 = engine("d1", decodes=True, node="one"), engine("d2", decodes=True, node="two")


PX, PY = (engine(f"p{name}", prefills=True, layout=name.encode()) for name in "xy")
DX, DY = (engine(f"d{name}", decodes=True, layout=name.encode()) for name in "xy")
REACHES = engine("r", prefills=True, node="one", reaches=frozenset({"two"}))
D3, D4 = engine("d3", decodes=True, node="three"), engine("d4", decodes=True, node="four")


def chosen(*candidates):
    found = pair(candidates)
    return found and (found.prefiller.url, found.decoder.url)


NAMED = engine("both", prefills=True, decodes=True, named=True)
IDLE = [Candidate(P1, last_used=1), Candidate(D1, last_used=9), Candidate(D2, last_used=2)]


@pytest.mark.parametrize(
    ("candidates", "wanted"),
    [
        ([Candidate(P, 2), Candidate(Q, 1), Candidate(D)], ("q", "d")),
        ([Candidate(P, last_used=2), Candidate(Q, last_used=1), Candidate(D)], ("q", "d")),
        ([Candidate(P, suspect=True), Candidate(Q, 5), Candidate(D)], ("q", "d")),
        ([Candidate(P, 1, cost=3), Candidate(Q, 2, cost=1), Candidate(D)], ("q", "d")),  # the prompt's cost decides
        ([Candidate(P), Candidate(D, 2), Candidate(E, 1)], ("p", "e")),
        ([Candidate(P, suspect=True), Candidate(D)], None),
        ([], None),
        ([Candidate(P)], None),  # the same prompt twice
        ([Candidate(P), Candidate(D, suspect=True)], None),
        ([Candidate(P), Candidate(Q, 1)], ("p", "q")),
        ([Candidate(BOTH)], None),  # twice the same work
        ([Candidate(NAMED)], ("both", "both")),
        ([Candidate(BOTH), Candidate(P, 9)], ("p", "both")),  # the only decoder is left alone
        ([Candidate(BOTH), Candidate(D, 9)], ("both", "d")),
        (IDLE, ("p1", "d1")),
        ([*IDLE, Candidate(P2, last_used=3)], ("p1", "d1")),  # of two such pairs, the one whose turn it is
        ([Candidate(P1, last_used=8), Candidate(D1), Candidate(D2), Candidate(P2)], ("p2", "d2")),
        ([Candidate(P1), Candidate(P2, last_used=5), Candidate(D2)], ("p2", "d2")),
        ([Candidate(P1), Candidate(D1, 1), Candidate(D2)], ("p1", "d2")),  # load goes before the wire
        ([Candidate(P1, 1), Candidate(D1), Candidate(P2)], ("p2", "d1")),
        ([Candidate(P1), Candidate(D1, suspect=True), Candidate(D2, 5)], ("p1", "d2")),
        ([Candidate(P), Candidate(P1, last_used=5), Candidate(D), Candidate(D1, last_used=5)], ("p1", "d1")),
        ([Candidate(P), Candidate(D, last_used=2), Candidate(D1)], ("p", "d1")),  # unknown nodes are not one node
        ([Candidate(PX), Candidate(DX, 5), Candidate(DY)], ("px", "dx")),  # of another layout it can read nothing
        ([Candidate(PX), Candidate(DY)], None),
        ([Candidate(PX), Candidate(DY), Candidate(D, 5)], ("px", "d")),  # of one layout nobody tells
        ([Candidate(REACHES), Candidate(D3), Candidate(D2, last_used=9)], ("r", "d2")),  # where a probe has gone
        ([Candidate(REACHES), Candidate(D3), Candidate(D2, 1)], ("r", "d3")),
        ([Candidate(REACHES), Candidate(D3), Candidate(D4), Candidate(D2, last_used=9)], ("r", "d2")),
    ],
)
def test_the_pair_is_chosen_by_load_then_node_then_turn(candidates, wanted):
    assert chosen(*candidates) == wanted


def test_an_engine_that_prefills_makes_an_only_token():
    assert decoder([Candidate(D), Candidate(P, 9), Candidate(Q, 8)], only_prefill=True) == Q
    assert decoder([Candidate(D), Candidate(P, suspect=True)], only_prefill=True) == D
    assert decoder([Candidate(D, 1), Candidate(E)], only_prefill=True) == E
    assert decoder([Candidate(D), Candidate(P)], tried=["p"], only_prefill=True) == D


def test_decoders_of_last_resort():
    assert decoder([Candidate(D, 2), Candidate(E, 1), Candidate(P)]) == E
    assert decoder([Candidate(D), Candidate(engine("f", decodes=True), 1)]) == D
    assert decoder([Candidate(D), Candidate(P)], tried=["d"]) == P
    assert decoder([Candidate(D, suspect=True), Candidate(P)]) == P
    assert decoder([Candidate(D, suspect=True), Candidate(P, suspect=True)]) == D
    assert decoder([Candidate(D)], tried=["d"]) is None
    assert decoder([]) is None


def test_where_all_are_suspect_a_request_does_not_try_them_all():
    """Each choice looks at all engines: with hundreds that are gone, one request would take a second."""
    dead = [Candidate(engine(str(at), decodes=True), suspect=True) for at in range(100)]
    tried = []
    while (found := decoder(dead, tried=tried)) is not None:
        tried.append(found.url)
    assert len(tried) == 8
    assert decoder([*dead, Candidate(D)], tried=tried) == D, "those that are well are all tried"


def test_the_wire_is_named_only_between_two_known_nodes():
    assert Pair(P1, D2).wire == "two"
    assert [Pair(*each).wire for each in [(P1, D1), (P, D1), (P1, D), (P, D)]] == [""] * 4


def test_the_planned_decoder_serves_as_long_as_it_can():
    planned = Pair(P1, D2)
    rest = [Candidate(D1), Candidate(P1), Candidate(P2)]
    assert decoder([*rest, Candidate(D2, 9, 9)], planned=planned) == D2
    assert decoder([*rest, Candidate(D2, suspect=True)], planned=planned) == D1
    assert decoder([*rest, Candidate(D2)], planned=planned, tried=["d2"]) == D1
    assert decoder(rest, planned=planned) == D1


def test_another_decoder_is_one_where_the_kv_is():
    E2 = engine("e2", decodes=True, node="two")
    planned = Pair(P1, D2)
    assert decoder([Candidate(D3), Candidate(E2, last_used=5)], planned=planned) == E2
    assert decoder([Candidate(D3), Candidate(D1, last_used=5)], planned=planned) == D1
    assert decoder([Candidate(D3), Candidate(E2, 1)], planned=planned) == D3  # load first, here too
    assert decoder([Candidate(D), Candidate(E, last_used=1)], planned=Pair(P, D), tried=["d"]) == E
    assert decoder([Candidate(BOTH), Candidate(E, 9)], planned=Pair(BOTH, D)) == E


candidates = st.lists(
    st.tuples(
        st.booleans(), st.booleans(), st.integers(0, 2), st.integers(0, 3), st.integers(0, 9).map(lambda n: not n),
        st.sampled_from(["", "one", "two"]), st.booleans(),
    ),
    max_size=8,
).map(
    lambda rows: [
        Candidate(engine(str(at), p, d, named, node=node), load, turn, suspect)
        for at, (p, d, load, turn, suspect, node, named) in enumerate(rows)
    ]
)  # fmt: skip


@given(candidates)
def test_no_pair_is_better_than_the_chosen_one(found):
    """Against trying all pairs: first the load of both, then the wire, then whose turn it is."""
    able = [each for each in found if each.engine.prefills and not each.suspect]
    decoders = [each.engine.url for each in found if each.engine.decodes and not each.suspect]
    able = [each for each in able if [each.engine.url] != decoders] or [each for each in able if each.engine.named]

    def rank(first, last):
        own = last.engine.url == first.engine.url
        wire = not first.engine.node or first.engine.node != last.engine.node
        load = (last.suspect, not last.engine.decodes, own, last.load)
        return (first.load, load, wire, first.last_used, last.last_used)

    every = [(rank(first, last), first.engine, last.engine) for first in able for last in found]
    best = pair(found)
    if best is None:
        assert not every or min(each[0] for each in every)[1][2], "only itself is left to decode"
    else:
        by_url = {each.engine.url: each for each in found}
        mine = rank(by_url[best.prefiller.url], by_url[best.decoder.url])
        assert mine == min(each[0] for each in every)


@pytest.mark.parametrize(
    ("unknown", "asked"),
    [(engine("x", decodes=True), ["x"]), (engine("x", prefills=True), ["live"])],
    ids=["it may be loading it", "it cannot answer"],
)
def test_a_model_that_nobody_is_known_to_have_is_asked_of_who_can_answer(unknown, asked):
    models = {"live": SimpleNamespace(models={"m": None}), "x": SimpleNamespace(models=None)}
    live = engine("live", prefills=True, decodes=True)
    assert [each.url for each in serving([live, unknown], SimpleNamespace(of=models.get), "typo")] == asked
