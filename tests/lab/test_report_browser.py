"""The report as a browser shows it: a real Chromium draws the page, presses its buttons, and finds no fault."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from launch.screenshot import Browser, installed
from streamrl.lab.report import command
from tests.lab.report_run import NASTY, STEPS, make_model, record_run

# of the data in a diagram, as opposed to its axes
COLOURS = """(() => {
    const { ctx } = diagrams[%d].plot;
    const written = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)).join();
    const frame = new Set(["--soft", "--line", "--ink"].map((name) => written(paint(`var(${name})`))));
    const { data } = ctx.getImageData(0, 0, ctx.canvas.width, ctx.canvas.height);
    const counts = {};
    for (let at = 0; at < data.length; at += 4) {
        const colour = data.slice(at, at + 3).join(", ");
        if (data[at + 3] === 255) counts[colour] = (counts[colour] ?? 0) + 1;
    }
    return Object.keys(counts).filter((each) => counts[each] > 20 && !frame.has(each.replaceAll(" ", "")))
        .map((each) => `rgb(${each})`);
})()"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(installed() is None, reason="needs Debian's chromium: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The report of one run, and that of two runs side by side."""
    folder = tmp_path_factory.mktemp("report")
    make_model(folder / "model")
    one = record_run(folder / "one", folder / "model")
    other = record_run(folder / "other", folder / "model", end=False, replay__max_staleness=4)
    command.main([one], folder / "single.html")
    command.main([one, other], folder / "both.html")
    return folder / "single.html", folder / "both.html"


def look(work: Callable[[Browser], Awaitable[None]]) -> None:
    """Run `work` with a browser; its page must not have raised, and asked for nothing but itself."""

    async def with_browser() -> None:
        async with Browser() as browser:
            await work(browser)
            await browser.evaluate("new Promise((done) => setTimeout(done, 100))")
            assert browser.errors == []
            assert {address.partition(":")[0] for address in browser.requests} <= {"file", "about"}
            assert len([address for address in browser.requests if address.startswith("file")]) == 1

    asyncio.run(with_browser())


def test_every_section_is_drawn_and_no_text_of_the_run_became_markup(pages: tuple[Path, Path]) -> None:
    async def work(browser: Browser) -> None:
        await browser.open(pages[0])
        assert await browser.evaluate("document.title") == "Report of one"
        assert await browser.evaluate("[...document.querySelectorAll('h2')].map((each) => each.textContent)") == [
            "Curves",
            "Staleness",
            "Lengths and selection",
            "Where the time went",
            "Events of note",
            "Samples over training",
            "Configuration",
        ]
        colours = [await browser.evaluate(COLOURS % each) for each in range(await browser.evaluate("diagrams.length"))]
        assert len(colours) > 10
        assert all(colours)
        assert await browser.evaluate("document.querySelectorAll('img, main script, main b b').length") == 0
        text = "[...document.querySelector('.tokens').childNodes].map((each) => each.textContent).join('')"
        assert (await browser.evaluate(text)).replace("·", "") == NASTY
        assert NASTY.split(" &amp;")[0] in await browser.evaluate("document.querySelector('main').textContent")

    look(work)


def test_buttons_change_axis_colours_and_step(pages: tuple[Path, Path]) -> None:
    async def work(browser: Browser) -> None:
        await browser.open(pages[0])
        name = "diagrams[0].plot.axes[0].label"
        assert await browser.evaluate(name) == "learner steps"
        await press(browser, "tokens")
        assert await browser.evaluate(name) == "trained tokens"
        await press(browser, "time")
        assert await browser.evaluate(name) == "seconds since the start"
        colours = "[...document.querySelectorAll('.tokens span')].map((each) => getComputedStyle(each).backgroundColor)"
        seen = [await browser.evaluate(colours)]
        for mode in ("log-prob ratio", "advantage", "log-prob"):
            await press(browser, mode)
            seen.append(await browser.evaluate(colours))
        assert len({tuple(each) for each in seen}) == 4
        assert len({each[1] for each in seen}) == 1  # a token that was not trained has no colour
        assert all(each[1] != each[2] for each in seen)
        heading = "document.querySelector('.answer').parentNode.querySelector('.title').textContent"
        assert f"step {STEPS - 1}" in await browser.evaluate(heading)
        await browser.evaluate(
            "(() => { const slider = document.querySelector('input[type=range]'); slider.value = 0;"
            "slider.dispatchEvent(new Event('input')); })()"
        )
        assert "step 0" in await browser.evaluate(heading)

    look(work)


def test_the_pointer_shows_the_values_under_it(pages: tuple[Path, Path]) -> None:
    async def work(browser: Browser) -> None:
        await browser.open(pages[0])
        label = "document.querySelector('.label').innerText"
        assert await browser.evaluate("document.querySelector('.label').hidden")
        first = "[...document.querySelectorAll('.card')].find((each) => each.textContent.startsWith('Reward'))"
        await browser.evaluate(f"{first}.querySelector('.u-over').id = 'reward'")
        await browser.point("#reward", 0.999)
        told = (await browser.evaluate(label)).split()
        assert told[:3] == [str(STEPS), "learner", "steps"]
        assert told[3:5] == ["reward/mean", "1"]
        for title, words in (
            ("Output lengths", "tokens trained"),
            ("Ages of trained tokens", "2 learner steps age 1 40% age 2 60%"),
            ("What each role did", "learner-0, 15"),
        ):
            card = f"[...document.querySelectorAll('.card')].find((each) => each.textContent.startsWith('{title}'))"
            await browser.evaluate(f"{card}.querySelector('.u-over').id = '{title.partition(' ')[0]}'")
            await browser.point(f"#{title.partition(' ')[0]}", 0.25)
            assert words in " ".join((await browser.evaluate(label)).split())
        await browser.point(".tokens span:nth-child(3)")
        told = await browser.evaluate(label)
        assert told.startswith("token 2")
        for name in ("version", "behaviour log-prob", "log-prob ratio", "advantage"):
            assert name in told

    look(work)


def test_several_runs_are_side_by_side_in_their_colours(pages: tuple[Path, Path]) -> None:
    async def work(browser: Browser) -> None:
        await browser.open(pages[1])
        rows = await browser.evaluate("[...document.querySelectorAll('section')][0].innerText")
        assert rows.split() == ["What", "differs", "key", "one", "other", "replay.max_staleness", "2.0", "4.0"]
        card = "[...document.querySelectorAll('.card')].find((each) => each.textContent.startsWith('Reward'))"
        number = await browser.evaluate(f"diagrams.indexOf({card}.querySelector('.diagram'))")
        strokes = await browser.evaluate(
            f"diagrams[{number}].plot.series.filter((each) => each.name).map((each) =>"
            "Object.assign(document.createElement('i').style, {color: each.stroke()}).color)"
        )
        heads = await browser.evaluate(
            "[...document.querySelectorAll('.runs > span > i')].map((each) => getComputedStyle(each).backgroundColor)"
        )
        assert len(heads) == 2
        assert set(heads) == set(strokes)
        assert await browser.evaluate("document.querySelector('.state.bad').textContent") == "ended without a last word"

    look(work)


@pytest.mark.parametrize("width", [1400, 500])
def test_it_fits_wide_and_narrow_in_light_and_dark(pages: tuple[Path, Path], width: int) -> None:
    async def work(browser: Browser) -> None:
        light = []
        for page in pages:
            for dark in (False, True):
                await browser.open(page, width=width, dark=dark)
                assert await browser.evaluate("document.documentElement.scrollWidth") <= width
                picture = np.asarray(Image.open(io.BytesIO(await browser.picture())).convert("L"), np.float32)
                assert picture.shape[1] == width
                assert picture.std() > 5  # something is drawn
                light.append(float(np.median(picture)))
                browser.requests.clear()
        assert light[0] > 200
        assert light[1] < 60
        await browser.open(pages[0], width=width)

    look(work)


def test_dragging_enlarges_a_stretch_of_a_diagram(pages: tuple[Path, Path]) -> None:
    async def work(browser: Browser) -> None:
        await browser.open(pages[0])
        left, top, width = await browser.evaluate(
            "(() => { const over = diagrams[0].plot.over; over.scrollIntoView({block: 'center'});"
            "const box = over.getBoundingClientRect(); return [box.left, box.top + box.height / 2, box.width]; })()"
        )
        for kind, share in (("mouseMoved", 0.2), ("mousePressed", 0.2), ("mouseMoved", 0.6), ("mouseReleased", 0.6)):
            await browser.command(
                "Input.dispatchMouseEvent", type=kind, x=left + share * width, y=top, button="left", clickCount=1
            )
        shown = await browser.evaluate("[diagrams[0].plot.scales.x.min, diagrams[0].plot.scales.x.max]")
        assert shown == pytest.approx([1 + 0.2 * (STEPS - 1), 1 + 0.6 * (STEPS - 1)], abs=0.1)

    look(work)


async def press(browser: Browser, text: str) -> None:
    """Press the button with this text."""
    await browser.evaluate(
        f"[...document.querySelectorAll('button')].find((each) => each.textContent === {text!r}).click()"
    )
