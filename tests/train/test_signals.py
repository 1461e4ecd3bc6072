import os
import signal
import subprocess
import sys

import pytest

from moe_jax.train.signals import StopRequest


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_noted_and_handlers_come_back(number, code):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert stop.signal is None and stop.exit_code == 0
        os.kill(os.getpid(), number)
        assert stop.signal == number and stop.exit_code == code
    assert signal.getsignal(number) is before


TWICE = """
import os, signal
from moe_jax.train.signals import StopRequest
with StopRequest() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    print("noted", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("not reached", flush=True)
"""


def test_a_second_signal_exits_at_once():
    process = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True)
    assert process.returncode == 130
    assert process.stdout == "noted\n"
    assert "SIGTERM: stopping after this step" in process.stderr
