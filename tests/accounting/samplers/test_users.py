"""Users with several examples: published numbers, dp_accounting, and from below."""

import numpy as np
import pytest
from scipy import special, stats

from accounting import lower_bounds, profiles
from accounting.core import accountant, neighboring_relation
from accounting.core.plan import DpSgdPlan
from accounting.core.pld import dominating_pairs
from accounting.core.validation import InputError
from tests.accounting.plans import composed, delta_bounds, make_plan

ADDED = neighboring_relation.ADD_OR_REMOVE_ONE
LARGE = {"num_examples": 10_000_000, "expected_batch_size": 10_000, "num_steps": 1000}
CRITEO = {"num_examples": 36_800_000, "expected_batch_size": 65_536, "num_steps": 562}
SMALL = {"num_examples": 60_000, "expected_batch_size": 600, "num_steps": 1000}


@pytest.mark.parametrize(
    ("fields", "noise", "delta", "rows", "published"),
    [
        (LARGE, 1.0, 1e-8, 5, 1.622),
        (LARGE, 1.0, 1e-8, 10, 3.151),
        (CRITEO, 0.8, 2.7e-8, 2, 2.33),
        (SMALL, 1.1, 1e-5, 5, 9.60),
    ],
)
def test_published_epsilon_of_users(fields, noise, delta, rows, published):
    plan = DpSgdPlan(sampler="poisson", **fields)
    asked = {"noise_multiplier": noise, "max_examples_per_user": rows}
    found = accountant.epsilon(plan, delta=delta, **asked).guarantee
    # Published to a coarse grid.
    assert found == pytest.approx(published, rel=5e-3)
    checked = delta_bounds(plan, epsilon=found, **asked)
    assert 0.96 * delta <= checked.lower <= checked.guarantee <= delta * 1.001


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fields", "noise", "delta", "of_groups", "of_users"),
    [
        (LARGE, 1.0, 1e-8, {2: 0.684, 5: 2.147, 10: 7.228}, {2: 0.642}),
        (CRITEO, 0.8, 2.7e-8, {2: 3.06, 5: 19.2}, {5: 4.97}),
        (SMALL, 1.1, 1e-5, {2: 3.42, 5: 12.42}, {2: 3.29}),
    ],
)
def test_published_epsilon_of_groups_and_the_other_ones_of_users(
    fields, noise, delta, of_groups, of_users
):
    """Together with the test above: all of the table, rounded as it is there."""
    plan = DpSgdPlan(sampler="poisson", **fields)
    asked = {"noise_multiplier": noise, "delta": delta}
    for rows, published in of_groups.items():
        found = profiles.group_epsilon(plan, group_size=rows, **asked)
        assert found == pytest.approx(published, rel=5e-3)
    for rows, published in of_users.items():
        found = accountant.epsilon(plan, max_examples_per_user=rows, **asked)
        assert found.guarantee == pytest.approx(published, rel=5e-3)


def test_poisson_of_users_is_what_dp_accounting_composes(small_plan):
    """Both members of the pair cut into cells, which dp_accounting composes."""
    rows = 3
    edges = np.concatenate(([-np.inf], np.linspace(-7, 7, 1401), [np.inf]))
    weights = stats.binom.pmf(np.arange(rows + 1), rows, 0.01)
    pair = [np.diff(special.ndtr(edges))] * 2
    pair[1] = sum(
        weight * np.diff(special.ndtr(edges - mean))
        for mean, weight in enumerate(weights)
    )
    low, high = composed((pair[0], pair[1]), 20, 1e-5)
    ours = accountant.epsilon(
        small_plan("poisson", num_steps=20, num_epochs=1),
        noise_multiplier=1.0,
        delta=1e-5,
        max_examples_per_user=rows,
    )
    assert low * 0.999 <= ours.guarantee <= high * 1.001


@pytest.mark.parametrize("sampler", ["poisson", "truncated-poisson", "deterministic"])
def test_noise_for_users_meets_the_target(small_plan, sampler):
    cap = 220 if sampler == "truncated-poisson" else None
    plan = small_plan(sampler, truncated_batch_size=cap)
    asked = {"epsilon": 3.0, "max_examples_per_user": 2}
    noise = accountant.noise_multiplier(plan, delta=1e-5, **asked).guarantee
    found = accountant.delta(plan, noise_multiplier=noise, **asked).guarantee
    assert 0.99e-5 < found <= 1e-5


@pytest.mark.parametrize("noise", [0.0, 0.3, 20.0])
@pytest.mark.parametrize("size", [3, 100])
def test_bounds_of_users_enclose(size, noise):
    plan = make_plan("poisson", 100, size, 2)
    found = delta_bounds(
        plan, noise_multiplier=noise, epsilon=0.5, max_examples_per_user=3
    )
    assert 0.0 <= found.lower <= found.guarantee <= 1.0
    assert found.guarantee <= (1 - (1 - size / 100) ** 6) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("plan", "noise"),
    [
        (make_plan("poisson", 10**8, 1000, 100), 0.49),
        # A sum of 45 rows, whose density without the user underflows.
        (make_plan("poisson", 100, 90, 2), 1.0),
    ],
)
def test_little_noise_for_each_of_many_rows_is_bounded_as_tightly(plan, noise):
    """Seen to fail: 526,736 for 7.57 at noise 0.49, and no lower bound at all."""
    asked = {"noise_multiplier": noise, "max_examples_per_user": 50}
    found = lower_bounds.epsilon(plan, delta=1e-9, **asked)
    assert 0.999 * found.guarantee <= found.lower <= found.guarantee


@pytest.mark.parametrize(("relation", "each"), [("REPLACE_SPECIAL", 1), (ADDED, 2)])
def test_a_step_keeps_no_more_of_a_user_than_its_cap(relation, each):
    """With all draws revealed.  Seen to fail with all 50 rows in each step."""
    plan = make_plan("truncated-poisson", 1000, 4, 3, cap=6)
    found = accountant.epsilon(
        plan,
        noise_multiplier=0.04,
        delta=1e-6,
        neighboring_relation=relation,
        max_examples_per_user=50,
    )
    alone = make_plan("deterministic", 3, 3, 3, epochs=3)
    one = accountant.epsilon(alone, noise_multiplier=0.04 / 6 / each, delta=1e-6)
    assert found.guarantee == pytest.approx(one.guarantee, rel=1e-6)


@pytest.mark.parametrize("rate", [1e-8, 0.01, 0.6])
@pytest.mark.parametrize("noise", [0.3, 1.0, 20.0])
def test_pairs_of_users(noise, rate):
    """Both members are probabilities, and the loss rises."""
    for step in dominating_pairs.steps(4, rate, noise):
        [(_, pair)] = step
        _, masses, x = pair.nodes(np.array([-4 - 9 * noise, 4 + 9 * noise]))
        masses, losses = masses.ravel(), pair.loss(x.ravel())
        assert masses.sum() == pytest.approx(1.0, abs=1e-11)
        assert (masses * np.exp(-losses)).sum() == pytest.approx(1.0, abs=1e-8)
        assert np.all(np.diff(losses) >= -1e-13 * np.maximum(np.abs(losses[1:]), 1e-3))


@pytest.mark.parametrize(("rows", "rate"), [(3, 0.5), (60, 1e-3), (500, 1e-6)])
def test_improbable_numbers_of_rows_count_as_all(rows, rate):
    """Weights that are left out would lower what is said; 1e-40 changes no epsilon."""
    exact = dominating_pairs.weights(rows, rate)
    found = dominating_pairs.upper_weights(rows, rate)
    assert np.count_nonzero(found) < max(rows, 5)  # many are left out
    of_as_many, of_as_many_exactly = (
        np.cumsum(each[::-1])[::-1] for each in (found, exact)
    )
    assert (of_as_many >= of_as_many_exactly * (1 - 1e-12)).all()


@pytest.mark.parametrize(
    ("sampler", "relation", "rows"),
    [
        ("balls-and-bins", "REPLACE_SPECIAL", 2),
        ("poisson", "REPLACE_ONE", 2),
        ("deterministic", "REPLACE_ONE", 2),
        ("poisson", "REPLACE_SPECIAL", 0),
        ("poisson", "REPLACE_SPECIAL", 51),
    ],
)
def test_users_are_refused_where_nothing_is_proven(small_plan, sampler, relation, rows):
    with pytest.raises(InputError, match=rf"max_examples_per_user={rows} .*group_eps"):
        accountant.epsilon(
            small_plan(sampler),
            noise_multiplier=1.0,
            delta=1e-5,
            neighboring_relation=relation,
            max_examples_per_user=rows,
        )
    if rows == 2:
        assert not neighboring_relation.is_supported(sampler, relation, rows)


def test_a_loss_is_not_capped_where_weights_underflow():
    """Without any row, of 50, with a probability of 1e-750.  Seen to fail: 744."""
    rate, noise, rows = 1 - 1e-15, 0.5, 50
    _, ((_, pair),) = dominating_pairs.steps(rows, rate, noise)
    counts = np.arange(rows + 1)
    shares = stats.binom.logpmf(counts, rows, rate) - counts**2 / (2 * noise**2)
    exact = -float(special.logsumexp(shares))
    assert exact > 1500.0
    # Weights that are no numbers are left out of the mixture that is divided by.
    assert float(pair.loss(np.zeros(1))[0]) >= exact * (1 - 1e-9)
