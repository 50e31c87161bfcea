"""The layout: every column has one executor, one group and one actor, whatever the numbers."""

from hypothesis import given
from hypothesis import strategies as st

from htsrl.storage.layout import Layout


@st.composite
def layouts(draw):
    envs = draw(st.integers(1, 70))
    return Layout(envs, draw(st.integers(1, envs)), draw(st.integers(1, 5)), draw(st.integers(1, 80)))


@given(layouts())
def test_columns_are_partitioned(layout):
    assert [n for columns in layout.executor_columns for n in columns] == list(range(layout.num_envs))
    assert [n for group in layout.groups for n in group] == list(range(layout.num_envs))
    sizes = [len(columns) for columns in layout.executor_columns]
    assert max(sizes) - min(sizes) <= 1


@given(layouts())
def test_groups_never_span_executors(layout):
    for e, groups in enumerate(layout.executor_groups):
        for g in groups:
            assert layout.executor_of[g] == e
            assert set(layout.groups[g]) <= set(layout.executor_columns[e])
            assert 1 <= len(layout.groups[g]) <= layout.envs_per_group
    assert set(layout.actor_of) <= set(range(layout.num_actors))
