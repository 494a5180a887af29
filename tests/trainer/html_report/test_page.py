"""Guarantees of the page of a privacy report."""

from __future__ import annotations

import html
import pathlib
import random
import re
from decimal import Decimal
from html.parser import HTMLParser
from typing import Any

import pytest
from click.testing import CliRunner

import dpsgd
from accounting.core.validation import InputError
from tests.trainer.html_report.conftest import of_colours
from trainer.html_report import facts, page


class Elements(HTMLParser):
    """Names and attributes of all elements, and the open ones."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, dict(attrs)))

    def of(self, *tags: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.found if tag in tags]


@pytest.fixture
def text(make_run: Any, audit_of: Any) -> str:
    """A page with everything on it."""
    return page.render(facts.collect(make_run(), audit=audit_of()))


def words_of(page: str) -> str:
    """The text of a page, without its style."""
    shown = re.sub(r"<style>.*?</style>|<[^>]+>", "", page, flags=re.DOTALL)
    return " ".join(html.unescape(shown).split())


def test_a_page_has_the_title_of_the_user_and_names_the_target(
    make_run: Any, tmp_path: pathlib.Path
) -> None:
    run, out = make_run(dataset=of_colours()), tmp_path / "page.html"
    command = ["report", str(run), "--title", "Who <likes> red?", "--out", str(out)]
    assert CliRunner().invoke(dpsgd.cli, command).exit_code == 0
    text = out.read_text()
    for tag in ("title", "h1"):
        assert f"<{tag}>Who &lt;likes&gt; red?</{tag}>" in text
    said = "predicts colour: red, <green>, dark blue"
    assert words_of(text).count(said.removeprefix("predicts ")) == 2
    assert f"A model that {said}" in words_of(text)
    assert "A model that predicts label" in page.render(facts.collect(make_run("b")))


def test_nothing_is_fetched(text: str) -> None:
    elements = Elements(text)
    fetching = ("script", "link", "img", "iframe", "object", "embed", "base", "image")
    assert not elements.of(*fetching)
    assert not re.search(r"https?:|//[a-z]|url\(|@import", text)
    addresses = [a["href"] for a in elements.of("a", "use") if "href" in a]
    assert addresses
    assert all(address.startswith("#") for address in addresses if address)
    [policy] = [m for m in elements.of("meta") if "http-equiv" in m]
    assert policy["content"].startswith("default-src 'none'")
    # It must stand before all that it forbids.
    assert text.index("http-equiv") < text.index("<style>")


def test_text_of_files_is_escaped(make_run: Any) -> None:
    evil = "<script>alert(1)<"
    run = make_run(evil, versions={evil: evil})
    text = page.render(facts.collect(run, delta=1e-8))
    assert not Elements(text).of("script")
    assert "&lt;script&gt;alert(1)&lt;" in text


def test_upper_bounds_are_rounded_up_and_lower_bounds_down(text: str) -> None:
    assert page._rounded(page.math.ceil)(1.00001) == "1.0001"
    assert page._rounded(page.math.floor)(1.99999) == "1.9999"
    assert page.percent_up(0.010001) == "1.1 %"
    # Seen: of every epsilon above 700 it was the factor of 700.
    assert page._factor_up(1486.8).startswith("5.12 ")
    assert page._factor_up(1486.8).endswith("10⁶⁴⁵")
    assert re.search(r"≤ \d\.\d{4}", text)
    source = random.Random(0)
    for _ in range(200):
        value = 10 ** source.uniform(-12, 12)
        digits, power = page._scientific_up(value).split(" \N{MULTIPLICATION SIGN} 10")
        power = power.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789"))
        shown, exact = Decimal(f"{digits}e{power}"), Decimal(repr(value))
        assert exact <= shown <= exact * Decimal("1.01")
        if value < 1:
            assert 1 / int(page._one_in(value)[7:].replace(",", "")) >= value


def test_a_file_takes_the_place_of_another_only_if_asked(
    make_run: Any, tmp_path: pathlib.Path
) -> None:
    run, out = make_run(), tmp_path / "report.html"
    out.write_text("mine")
    with pytest.raises(InputError, match="to be a new file"):
        page.write_report(run, out)
    assert out.read_text() == "mine"
    found = page.write_report(str(run), str(out), overwrite=True)
    assert found["run"]["name"] == "run"
    assert out.read_text() == page.render(found)
