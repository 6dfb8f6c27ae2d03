"""Whatever text goes into markup comes out as that text, and as nothing else."""

import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st
from report_runs import HOSTILE, Page

from trisect.report.markup import UNWRITABLE, Markup, escape, join, tag

ANY_TEXT = st.text(st.characters(), max_size=30)


@given(ANY_TEXT)
def test_text_and_attributes_are_read_back_as_they_went_in(text: str) -> None:
    written = UNWRITABLE.sub("\ufffd", text)
    element = tag("p", text, data_x=text)
    element.encode("utf-8")
    root = ET.fromstring(element)
    # XML readers make every line break a newline, and every blank in an attribute a space.
    assert (root.text or "") == written.replace("\r\n", "\n").replace("\r", "\n")
    assert root.attrib["data-x"].split() == written.split()
    assert len(root) == 0


def test_hostile_text_makes_no_element() -> None:
    page = Page.of(tag("p", HOSTILE, title=HOSTILE))
    assert [element.name for element in page.elements] == ["p"]
    assert page.elements[0].text == HOSTILE
    assert page.elements[0].attributes == {"title": HOSTILE}
    assert not page.comments


def test_markup_is_not_escaped_twice_and_none_is_nothing() -> None:
    inner = tag("b", "a & b")
    assert tag("p", inner, None, class_=None) == "<p><b>a &amp; b</b></p>"
    assert escape(inner) is inner
    assert join("<", Markup("<"), None) == "&lt;<"


def test_what_utf8_and_xml_cannot_hold_is_replaced() -> None:
    assert escape("a\x00b\ud800c\x1bd") == "a\ufffdb\ufffdc\ufffdd"
