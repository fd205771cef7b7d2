"""Models that nobody thought of train to the numbers of plain PyTorch."""

from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_models import BORROWING, OPTIMIZERS, OWNING, PLAIN, Node, Training, train
from support.training import WHOLE_MODEL


@st.composite
def models(draw):
    """Nodes that borrow from those before and after them; the last is linear, so that there is something to borrow."""
    kinds = [*draw(st.lists(st.sampled_from([*OWNING, *PLAIN, *BORROWING]), max_size=8)), "linear"]
    return tuple(draw(nodes(kinds, index)) for index in range(len(kinds)))


@st.composite
def nodes(draw, kinds, index):
    """The node of a place in a model of these kinds."""
    kind, of, frozen, checkpoint = kinds[index], None, "never", "no"
    source = draw(st.just(index) | st.integers(0, index))  # mostly the value before, or no model would be deep
    if kind == "add":
        of = draw(st.integers(0, index))
    elif kind in BORROWING:
        of = draw(st.sampled_from([at for at, lender in enumerate(kinds) if _lends(lender, kind)]))
    elif kind in OWNING and index < len(kinds) - 1:  # something is to be trained
        frozen = draw(st.sampled_from(["never", "never", "never", "always", "before", "after"]))
    if kind != "add":
        checkpoint = draw(st.sampled_from(["no", "no", "no", "reentrant", "non-reentrant"]))
    return Node(kind, source, of, frozen, checkpoint)


def _lends(lender, kind):
    return lender in OWNING if kind == "reuse" else lender == "linear"


trainings = st.builds(
    Training,
    world_size=st.sampled_from([2, 3]),
    threshold_bytes=st.sampled_from([WHOLE_MODEL, 1000, 1]),
    update=st.sampled_from(["replicated", "sharded"]),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    micro_batches=st.sampled_from([1, 1, 2]),
    no_sync=st.booleans(),
    max_norm=st.sampled_from([None, None, 0.1]),
    set_to_none=st.booleans(),
    zero_at_end=st.booleans(),
    penalty=st.booleans(),
    scaled=st.booleans(),
    between=st.sampled_from(["nothing", "lr", "project", "evaluate", "copy", "fuse", "hold"]),
)


# Derandomized: a change is not to fail for what another one did. No deadline: the first example starts the ranks.
@settings(max_examples=100, derandomize=True, deadline=None)
@given(model=models(), training=trainings)
def test_random_models_equal_a_single_process(ranks, model, training):
    """Whatever a model is made of, and however it is trained, it ends where one process ends, equal on all ranks."""
    pool = ranks(training.world_size)
    outcomes = pool.run(train, model, training)
    refusals = {outcome.refusal for outcome in outcomes}
    if len(refusals) > 1:
        pool.close()  # the ranks may be in the middle of different collectives
    assert refusals == {""}
    assert max(outcome.distance for outcome in outcomes) < 1e-12
    assert max(outcome.norms for outcome in outcomes) < 1e-12
    assert len({outcome.digest for outcome in outcomes}) == 1
