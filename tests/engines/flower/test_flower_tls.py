"""Flower with TLS and authenticated SuperNodes, by the commands of its page.

Covers: drjax.engines.flower.adapter.
"""

# pyright: reportMissingImports=false

import json
import re
import shlex
from types import SimpleNamespace

import numpy as np
import pytest

import drjax
from drjax.backends import reference
from tests.engines.flower.clients import ROOT, federation
from tests.helpers.conformance import free_ports, wait_for

pytestmark = [
    pytest.mark.engines,
    pytest.mark.usefixtures("leaks_unchecked"),
    pytest.mark.filterwarnings("ignore"),  # Flower's own
]


def documented() -> list[list[str]]:
    """The commands of the page, each as words."""
    page = (ROOT / "docs" / "engines" / "flower.md").read_text()
    (block,) = re.findall(r"```bash tls\n(.*?)```", page, re.S)
    return [shlex.split(x) for x in block.replace("\\\n", " ").splitlines()]


def test_tls_and_authenticated_supernodes(tmp_path):
    """Who is not registered, or does not use TLS, takes no part."""
    folder, output = tmp_path / "runs" / "flower", tmp_path / "model.npz"
    connection = f'root-certificates = "{folder / "ca.pem"}"'
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    with federation(tmp_path, connection) as processes:
        cwd, ids, others = tmp_path, [], []
        for program, *words in documented():
            if program == "cd":
                cwd = cwd / words[0]
            elif program == "flower-superlink":
                assert words.pop() == "&"
                processes.link(*words, cwd=cwd)
                others = strangers(processes, cwd)
            elif program == "flower-supernode":
                assert words.pop() == "&"
                words[words.index("--superlink") + 1] = processes.address
                words[words.index("--port") + 1] = str(*free_ports(1))
                processes.start(program, *words, cwd=cwd)
            elif words[0] == "run":
                config = words[-1].replace("$PWD", str(cwd))
                config = config.replace("ID0", ids[0]).replace("ID1", ids[1])
                config += f" output='{output}' rounds=2 timeout=240"
                processes.run(program, "run", cwd / words[1], *words[2:-1], config)
            else:
                printed = processes.run(program, *words, cwd=cwd)
                ids += re.findall(r"SuperNode (\d+) registered", printed)
        wait_for(output.exists)
        assert len(ids) == 2 and len(others) == 2
        for process in others:
            assert process.wait(60) != 0
    check(output)


def strangers(processes, folder):
    """SuperNodes that claim group 0: one with a key of its own, one without TLS."""
    from examples.flower import credentials

    credentials.make(folder / "stranger", 1)
    key = folder / "stranger" / "node-0"
    flags = [
        ("--root-certificates", folder / "ca.pem", "--auth-supernode-private-key", key),
        ("--insecure",),
    ]
    return [processes.node(*x, "--max-retries", 1, group=0) for x in flags]


def check(output):
    """The rounds are those of both clients."""
    from examples.flower.drjax_app.client import load
    from examples.flower.plan import step

    with np.load(output) as file:
        history, model = json.loads(str(file["history"])), file["model"]
    slices = [load(SimpleNamespace(node_config={"partition-id": i})) for i in range(2)]
    data = tuple(np.stack(column) for column in zip(*slices, strict=True))
    expected = np.zeros(3, np.float32)
    assert len(history) == 2
    for a_round in history:
        assert a_round["dropped"] == {} and len(a_round["pids"]) == 2
        plan = drjax.make_plan(step(2))(expected, data)
        expected, loss = reference.compile(plan)(expected, data)
        np.testing.assert_allclose(loss, a_round["loss"], rtol=1e-5)
    np.testing.assert_allclose(model, expected, rtol=1e-5)
