import os
import termios

from moe_jax.train import progress
from moe_jax.train.progress import Progress


def test_a_log_has_few_lines_but_is_alive(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Progress(steps=100, name="dense") as shown:
        shown.say("compiling")
        now[0] += 20.0
        shown.start(0)
        for step in range(1, 101):
            now[0] += 1.0
            shown.advance(step)
            shown.update(step, loss=2.0, tokens_per_second=12345.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "dense: compiling"
    # A second a step, and more than 30 s since the last line: 20 s compiling and 11 steps.
    assert lines[1] == "dense: step 11/100, loss 2.0000, tokens/s 12,345, 01:29 left"
    assert lines[-1].startswith("dense: step 100/100, ")
    assert len(lines) == 5


def test_a_terminal_has_a_bar(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_is_screen", lambda stream: True)
    with Progress(steps=10) as shown:
        shown.start(5)
        shown.update(6, loss=2.0, tokens_per_second=12345.0)
        shown.say("validation")
    captured = capsys.readouterr()
    assert "6/10" in captured.err and "loss=2.0000, tokens/s=12,345" in captured.err
    assert "validation" in captured.out


def test_only_a_terminal_with_columns_is_a_screen(tmp_path):
    with (tmp_path / "log").open("w") as file:
        assert not progress._is_screen(file)
    main, other = os.openpty()
    with os.fdopen(main, "rb"), os.fdopen(other, "w") as terminal:
        for columns, expected in ((0, False), (100, True)):
            termios.tcsetwinsize(terminal.fileno(), (24, columns))
            assert progress._is_screen(terminal) is expected
