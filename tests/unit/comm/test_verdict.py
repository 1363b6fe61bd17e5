"""What ranks tell each other of a call arrives whole, whatever is in it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerort.comm.guard.call import Call
from zerort.comm.guard.stance import Stance
from zerort.comm.guard.verdict import mismatch_error, tell_story
from zerort.errors import CallError

ROOM = 4096
"""Bytes of a text that every transport carries."""

TEXTS = st.text(st.characters(), max_size=3000) | st.sampled_from(["😀", "\x01", '"', "\ud800"]).map(
    lambda one: one * 900
)


@given(TEXTS, TEXTS, TEXTS, st.sampled_from([None, Stance(turn=3)]))
def test_a_story_of_any_texts_fits_and_can_be_read(site, name, complaint, stance):
    call = Call("all_reduce", site, 7, name=name, complaint=complaint)
    call.stance = stance
    call.tally = lambda: {f"{at}:12": 123_456_789 for at in range(32)}
    story = tell_story(call)
    assert len(story.encode()) <= ROOM
    told = json.loads(story)
    assert told["sequence"] == 7
    assert set(told) == {"text", "site", "complaint", "sequence", "stance", "parts"}
    assert told["parts"]["31:12"] == 123_456_789


@pytest.mark.parametrize(
    "text", ["batch 17", "😀" * 600, "\x01" * 600, "ü" * 5000], ids=["short", "emoji", "control", "long"]
)
def test_the_complaint_of_a_rank_is_told_from_its_beginning(text):
    error = mismatch_error("group 'world'", [tell_story(Call("barrier", "a.py:1", 3, complaint=text))])
    assert isinstance(error, CallError)
    assert text[:100] in str(error)
