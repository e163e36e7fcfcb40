"""What a person does in JupyterLab, done in JupyterLab (K1, K3, K4, K8, C5)."""

from __future__ import annotations

import re
import time
from typing import Any

import nbformat
import pytest
from playwright.sync_api import Locator, Page, expect

from tests.clients.browser.conftest import Desk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PLOT = "import matplotlib.pyplot as plt\n_ = plt.plot([1, 4, 9])"
SLIDER = """
import ipywidgets as widgets
from IPython.display import display
slider, said = widgets.IntSlider(value=3, max=10), widgets.Output()
slider.observe(lambda change: said.append_stdout(f"moved to {change['new']}"), "value")
display(slider, said)
"""


def write(desk: Desk, name: str, kernel: str, *cells: str) -> None:
    book = nbformat.v4.new_notebook(
        metadata={"kernelspec": {"name": kernel, "display_name": kernel}}
    )
    book.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    nbformat.write(book, desk.root / f"{name}.ipynb")


class Book:
    """An open notebook whose kernel runs."""

    def __init__(self, desk: Desk, name: str) -> None:
        self.page: Page = desk.page
        desk.open(f"lab/tree/{name}.ipynb?reset")
        expect(self.page.locator("#jp-main-statusbar")).to_contain_text("| Idle")
        self.idle()

    def cell(self, number: int) -> Locator:
        return self.page.locator(".jp-Notebook .jp-CodeCell").nth(number)

    def output(self, number: int) -> Locator:
        return self.cell(number).locator(".jp-Cell-outputArea")

    def idle(self) -> None:
        indicator = self.page.locator(".jp-Notebook-ExecutionIndicator")
        expect(indicator).to_have_attribute("data-status", "idle")

    def run(self, number: int) -> Locator:
        self.cell(number).locator(".cm-content").click()
        self.page.keyboard.press("Control+Enter")
        return self.output(number)

    def press(self, command: str) -> None:
        self.page.locator(f'.jp-Toolbar [data-command="{command}"]').first.click()

    def accept(self) -> None:
        self.page.locator(".jp-Dialog .jp-mod-accept").click()


def test_a_kernel_from_the_launcher_does_what_a_local_one_does(desk: Desk) -> None:
    """K1, K3, K4: launcher, output, plot, widget, input, interrupt, restart, death."""
    desk.open("lab?reset")
    card = desk.page.locator('.jp-LauncherCard[data-category="Notebook"]')
    expect(card.filter(has_text="Python 3 (sandbox)")).to_be_visible()
    desk.picture("launcher")
    write(
        desk, "story", "sandbox-python",
        "import os; print('hello from', os.getuid())\n_ = open('/workspace/f', 'w').write('kept')",
        PLOT,
        SLIDER,
        "name = input('name? ')\nprint('got', name)",
        "while True: pass",
        "print('name' in globals(), open('/workspace/f').read())",
        "import os; os._exit(7)",
    )  # fmt: skip
    book = Book(desk, "story")
    expect(book.run(0)).to_contain_text("hello from 10001")
    expect(book.run(1).locator("img")).to_be_visible()
    out = book.run(2)
    handle = out.locator(".noUi-handle")
    expect(handle).to_be_visible()
    handle.focus()
    desk.page.keyboard.press("ArrowRight")
    expect(out).to_contain_text("moved to 4")
    desk.picture("plot-and-slider")
    out = book.run(3)
    asked = out.locator(".jp-Stdin-input")
    asked.fill("Ada")
    asked.press("Enter")
    expect(out).to_contain_text("got Ada")
    out = book.run(4)
    expect(desk.page.locator(".jp-Notebook-ExecutionIndicator")).to_have_attribute(
        "data-status", "busy"
    )
    book.press("notebook:interrupt-kernel")
    expect(out).to_contain_text("KeyboardInterrupt")
    book.press("notebook:restart-kernel")
    book.accept()
    book.idle()
    expect(book.run(5)).to_contain_text("False kept")
    out = book.run(6)
    expect(out).to_contain_text("exit code 7")
    desk.picture("death")
    expect(desk.page.locator(".jp-Dialog")).to_contain_text(re.compile("died|restart", re.I))
    book.accept()


def test_the_dialog_says_why_a_kernel_cannot_start(desk: Desk) -> None:
    """K8."""
    write(desk, "missing", "sandbox-missing", "1")
    desk.open("lab/tree/missing.ipynb?reset")
    dialog = desk.page.locator(".jp-Dialog")
    expect(dialog).to_contain_text("no/such:image")
    desk.picture("launch-error")
    dialog.locator(".jp-mod-accept").first.click()


def test_cells_in_sandboxes_ask_before_the_network_and_stop(desk: Desk) -> None:
    """C5, issue 6: consent is asked for in the page; Stop ends a cell, and "Run All" with it."""
    write(
        desk, "magics", "python3",
        "%load_ext sandbox_magics",
        "%%sandbox\necho from the sandbox; echo data > /output/a.txt",
        "%%sandbox -n\ntrue",
        "%%sandbox\ntrap '' INT TERM; echo up; sleep 1000",
        "print('never')",
    )  # fmt: skip
    book = Book(desk, "magics")
    book.run(0)
    book.idle()
    expect(book.run(1)).to_contain_text("from the sandbox")
    expect(book.output(1)).to_contain_text("exit 0")
    desk.picture("magics-cell")
    out = book.run(2)
    asked = out.locator(".jp-Stdin-input")
    expect(asked).to_be_visible()
    desk.picture("consent")
    asked.fill("no")
    asked.press("Enter")
    expect(out).to_contain_text("SandboxNetworkDenied")
    # From here on all that is below.
    book.cell(3).locator(".cm-content").click()
    desk.page.get_by_role("menuitem", name="Run", exact=True).click()
    desk.page.get_by_role("menuitem", name=re.compile("Selected Cell and All Below")).click()
    expect(book.output(3)).to_contain_text("up")
    began = time.monotonic()
    book.press("notebook:interrupt-kernel")
    expect(book.output(3)).to_contain_text("nothing of it runs any more")
    assert time.monotonic() - began < 10
    book.idle()
    expect(book.output(4)).to_have_text("")
    desk.picture("stopped")


def test_notebook_7_runs_it_too(desk: Desk) -> None:
    """K1."""
    write(desk, "seven", "sandbox-python", "print(6 * 7)", PLOT, "while True: pass")
    desk.open("notebooks/seven.ipynb")
    book: Any = Book.__new__(Book)
    book.page = desk.page
    expect(book.cell(0)).to_be_visible()
    book.idle()
    expect(book.run(0)).to_contain_text("42")
    expect(book.run(1).locator("img")).to_be_visible()
    out = book.run(2)
    book.press("notebook:interrupt-kernel")
    expect(out).to_contain_text("KeyboardInterrupt")
    desk.picture("notebook-7")
