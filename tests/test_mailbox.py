"""Mailboxes under scripted orders: nothing is lost, one read takes all that waits, an end is noticed."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from htsrl.actors.mailbox import mailbox


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=2000), min_size=1, max_size=7))
def test_one_take_returns_everything_that_waits_in_order(posts):
    inbox, outbox = mailbox()
    for numbers in posts:
        outbox.post_array(np.array(numbers, np.uint32))
    assert inbox.take() == [n for numbers in posts for n in numbers]
    inbox.close()
    outbox.close()


def test_take_blocks_until_somebody_posts():
    inbox, outbox = mailbox()
    taken = []
    reader = threading.Thread(target=lambda: taken.append(inbox.take()))
    reader.start()
    reader.join(0.05)
    assert reader.is_alive()
    outbox.post(7, 8)
    reader.join(60)
    assert taken == [[7, 8]]
    inbox.close()
    outbox.close()


def test_posts_of_several_writers_stay_whole():
    inbox, outbox = mailbox()
    writers = [threading.Thread(target=outbox.post_array, args=(np.full(1000, w, np.uint32),)) for w in range(8)]
    for writer in writers:
        writer.start()
    numbers = []
    while len(numbers) < 8000:
        numbers += inbox.take()
    for writer in writers:
        writer.join()
    assert np.bincount(numbers).tolist() == [1000] * 8
    inbox.close()
    outbox.close()


def test_a_mailbox_without_writers_ends():
    inbox, outbox = mailbox()
    outbox.close()
    with pytest.raises(EOFError):
        inbox.take()
    inbox.close()
