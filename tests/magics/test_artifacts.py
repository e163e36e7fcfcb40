"""Files out of and into sandboxes: artifacts, get, put, ls, and variables as files."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.error import UsageError
from sandbox_magics.secret import Secret
from sandbox_magics.variables import from_file, to_file, variable_of

from tests.magics.conftest import Open
from tests.magics.notebook import Notebook

PLOT = """
import matplotlib; matplotlib.use("Agg")
import matplotlib.pyplot as plt
plt.plot([1, 4, 9]); plt.savefig("/output/plot.png")
"""


def here(notebook: Notebook) -> Path:
    return Path(notebook.ask("__import__('os').getcwd()"))


def test_images_are_shown_and_can_be_had(notebook: Notebook) -> None:
    """Artifacts: png inline; `.bytes`, `.save`; the footer counts them."""
    cell = notebook.run(f"%%sandbox python3 -\n{PLOT}", answers=[])
    assert cell.error == ("", "")
    shown = [d for d in cell.displays if "image/png" in d]
    assert len(shown) == 1
    assert base64.b64decode(shown[0]["image/png"]).startswith(b"\x89PNG")
    assert any("1 artifact" in d["text/plain"] for d in cell.displays)
    head = notebook.ask("_sandbox.artifacts['plot.png'].bytes[:4]")
    assert head == b"\x89PNG"
    notebook.run("_sandbox.artifacts['plot.png'].save('kept.png')", ok=True)
    assert (here(notebook) / "kept.png").read_bytes().startswith(b"\x89PNG")
    again = notebook.run("_sandbox.artifacts['plot.png'].save('kept.png')")
    assert again.error[0] == "FileExistsError"
    # What was shown is not shown again, what changed is.
    assert notebook.run("%%sandbox\ntrue", ok=True).displays == []
    changed = notebook.run("%%sandbox\necho hello > /output/words.txt", ok=True)
    assert changed.displays == []
    assert changed.out == "[artifact] words.txt · 6 B\n"
    newest = notebook.run("%sandbox_artifacts", ok=True)
    assert "words.txt" in newest.value
    notebook.run("%%sandbox\nrm /output/*", ok=True)


def test_artifacts_of_a_fresh_run_outlive_it(notebook: Notebook) -> None:
    """Artifacts: `r.artifacts[...]` after the sandbox has gone."""
    notebook.run(
        "r = %sandbox_run -q --shell 'mkdir /output/d; echo deep > /output/d/x.txt'", ok=True
    )
    assert notebook.ask("(list(r.artifacts), r.artifacts['d/x.txt'].bytes)") == (
        ["d/x.txt"], b"deep\n",
    )  # fmt: skip


def test_tables_json_and_html_are_shown_safely(notebook: Notebook) -> None:
    """Artifacts: first rows read in the sandbox; json; html and svg where they can do nothing."""
    script = r"""
printf 'name,n\n<b>a</b>,1\nb,2\n' > /output/t.csv
printf '{"a": [1, 2]}' > /output/d.json
printf '<script>alert(1)</script><p>hi' > /output/p.html
printf '<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"/>' > /output/s.svg
"""
    cell = notebook.run(f"%%sandbox --fresh\n{script}", ok=True)
    by_name = {d["text/plain"].split(" ")[0]: d for d in cell.displays}
    assert set(by_name) == {"t.csv", "d.json", "p.html", "s.svg"}
    table = by_name["t.csv"]["text/html"]
    assert "<th" in table
    assert "&lt;b&gt;a" in table
    assert "<b>" not in table
    assert by_name["d.json"]["application/json"] == {"a": [1, 2]}
    frame = by_name["p.html"]["text/html"]
    assert frame.startswith('<iframe sandbox=""')
    assert "<script" not in frame
    assert "default-src" in frame
    svg = by_name["s.svg"]["text/html"]
    assert svg.startswith("<img ")
    assert "onload" not in svg


def test_what_is_no_file_is_refused_and_named(notebook: Notebook) -> None:
    """TAR-01, TAR-04, KMS-13: links, FIFOs and hostile names are listed, never followed."""
    script = r"""
ln -s /etc/passwd /output/link.png
mkfifo /output/fifo
printf x > $'/output/a\nb'
printf x > $'/output/c\x1b[2J.txt'
printf fine > /output/good.txt
printf '<img src=x>' > '/output/<img src=x>.txt'
"""
    cell = notebook.run(f"%%sandbox --fresh -r r\n{script}", ok=True)
    assert cell.displays == []
    assert "\x1b" not in cell.out
    assert re.search(r"refused: link.png: it is a symbolic link", cell.out)
    assert re.search(r"refused: fifo: it is a FIFO", cell.out)
    assert cell.out.count("its name is not a safe one") == 2
    assert notebook.ask("sorted(r.artifacts)") == ["<img src=x>.txt", "good.txt"]
    assert "<img" not in notebook.ask("r.artifacts._repr_html_()")


def test_very_many_files_are_bounded(open_one: Open) -> None:
    """Acceptance: 10⁵ files in /output; the cell ends, and says what it did not list."""
    with open_one() as notebook:
        script = (
            "import os\nfor i in range(32000):\n"
            "    open(f'/output/{i}', 'x').close() if i < 30000 else None"
        )
        cell = notebook.run(f"%%sandbox python3 -\n{script}", ok=True)
        assert "not listed" in cell.out
        assert len(cell.out) < 1000


def test_artifacts_are_copied_only_on_request_and_over_nothing(notebook: Notebook) -> None:
    """Artifacts: `-a GLOB`, into the notebook's folder; no overwriting; misses are errors."""
    script = "mkdir -p /output/sub; echo 1 > /output/a.dat; echo 2 > /output/sub/b.dat"
    notebook.run(f"%%sandbox --fresh -q -a '*.dat' -a 'sub/*'\n{script}", ok=True)
    folder = here(notebook)
    assert (folder / "a.dat").read_text() == "1\n"
    assert (folder / "sub/b.dat").read_text() == "2\n"
    twice = notebook.run(f"%%sandbox --fresh -q -a '*.dat'\n{script}; echo 3 > /output/a.dat")
    assert twice.error[0] == "SandboxConflictError"
    assert (folder / "a.dat").read_text() == "1\n"
    missing = notebook.run("%%sandbox --fresh -q -a none.dat\ntrue")
    assert missing.error[0] == "SandboxFileNotFoundError"
    outside = notebook.run("%%sandbox --fresh -q -a ../x\ntrue")
    assert outside.error[0] == "SandboxSpecRejectedError"


def test_get_put_and_ls(notebook: Notebook) -> None:
    """Magics: files of the notebook's sandbox, streamed, in the notebook's folder only."""
    folder = here(notebook)
    (folder / "data.csv").write_text("x\n1\n")
    told = notebook.run("%sandbox_put data.csv", ok=True)
    assert told.out == "/workspace/data.csv: 1 file, 4 B\n"
    assert notebook.run("%%sandbox\nsed s/1/2/ data.csv | tee back.csv", ok=True).out == "x\n2\n"
    assert "back.csv" in notebook.run("%sandbox_ls", ok=True).value
    table = notebook.run("%sandbox_ls -R /workspace", ok=True).of("execute_result")[0]["data"]
    assert "<table" in table["text/html"]
    notebook.run("%sandbox_get back.csv", ok=True)
    assert (folder / "back.csv").read_text() == "x\n2\n"
    assert notebook.run("%sandbox_get back.csv").error[0] == "SandboxConflictError"
    notebook.run("%sandbox_get -f back.csv", ok=True)
    for target in ("/tmp/x", "../x", "a/../../x"):
        assert notebook.run(f"%sandbox_get back.csv {target}").error[0] == "UsageError", target
    (folder / "away").symlink_to("/tmp")
    assert notebook.run("%sandbox_get back.csv away/x").error[0] == "UsageError"
    assert notebook.run("%sandbox_get missing").error[0] == "SandboxFileNotFoundError"
    assert notebook.run("%sandbox_put nothing-here").error[0] != ""


def test_get_needs_a_session(open_one: Open) -> None:
    """Magics: looking makes no sandbox."""
    with open_one() as notebook:
        assert notebook.run("%sandbox_ls").error[0] == "UsageError"


def test_variables_travel_as_files(notebook: Notebook) -> None:
    """Variables: `--push` and `--pull`, by suffix; a missing file is an error."""
    notebook.run("data = {'a': [1, 2]}\ntext = 'héllo'\nblob = bytes(range(256))", ok=True)
    script = """
import json, pathlib
d = json.loads(pathlib.Path("in/d.json").read_text())
pathlib.Path("out.json").write_text(json.dumps({"sum": sum(d["a"])}))
pathlib.Path("copy.bin").write_bytes(pathlib.Path("blob.bin").read_bytes()[::-1])
pathlib.Path("t.txt").write_text(pathlib.Path("text.txt").read_text() * 2)
"""
    flags = "--push data=in/d.json --push blob --push text"
    flags += " --pull out.json=result --pull copy.bin=back --pull t.txt"
    notebook.run(f"%%sandbox --fresh {flags} python3 -\n{script}", ok=True)
    assert notebook.ask("(result, back == blob[::-1], t)") == ({"sum": 3}, True, "héllohéllo")
    missing = notebook.run("%%sandbox --pull nothing.json=x\ntrue")
    assert missing.error[0] == "SandboxFileNotFoundError"
    wrong = notebook.run("%%sandbox --pull bad.json=x\necho '{' > bad.json")
    assert wrong.error[0] == "UsageError"


@given(st.binary(), st.text(st.characters(blacklist_categories=["Cs"])))
def test_bytes_and_texts_come_back_as_they_went(data: bytes, text: str) -> None:
    """Variables: nothing is made of bytes and texts."""
    path, written = to_file("v", data, "")
    assert (path, from_file(path, written)) == ("v.bin", data)
    path, written = to_file("v", text, "")
    assert (path, from_file(path, written)) == ("v.txt", text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(blacklist_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=10,
)


@given(st.lists(JSON))
def test_plain_data_comes_back(data: list[object]) -> None:
    """Variables: JSON."""
    path, written = to_file("v", data, "")
    assert path == "v.json"
    assert from_file(path, written) == json.loads(json.dumps(data))


class Frame:
    """What a data frame is to the magics: two methods; pandas need not be installed."""

    def to_csv(self, sink: object, index: bool) -> None:
        sink.write(b"csv")  # type: ignore[attr-defined]

    def to_parquet(self, sink: object, index: bool) -> None:
        sink.write(b"parquet")  # type: ignore[attr-defined]


def test_what_cannot_be_a_file_is_refused() -> None:
    """Variables: never a pickle; a secret is no file."""
    assert to_file("f", Frame(), "") == ("f.csv", b"csv")
    assert to_file("f", Frame(), "x.parquet") == ("x.parquet", b"parquet")
    for value, path in ((object(), ""), (object(), "x.pkl"), ({1}, ""), (Secret("abcd"), "x.txt")):
        with pytest.raises(UsageError):
            to_file("v", value, path)
    with pytest.raises(UsageError, match="cannot be read"):
        from_file("x.json", b"{")
    assert variable_of("results/my-table.v2.csv") == "my_table_v2"
    assert variable_of("2.csv") == "_2"


def test_pickles_in_arrays_are_refused() -> None:
    """Variables: `allow_pickle=False`, both ways."""
    numpy = pytest.importorskip("numpy")
    path, data = to_file("a", numpy.arange(3), "")
    assert path == "a.npy"
    assert list(from_file(path, data)) == [0, 1, 2]
    with pytest.raises(UsageError):
        to_file("a", numpy.array([object()], dtype=object), "x.npy")
