"""Flower with TLS and authenticated SuperNodes, as real processes on loopback."""

# pyright: reportMissingImports=false

import json
from types import SimpleNamespace

import numpy as np
import pytest

import drjax
from drjax.backends import reference
from tests.conformance import wait_for
from tests.flower_clients import federation

pytestmark = [
    pytest.mark.engines,
    pytest.mark.usefixtures("leaks_unchecked"),
    pytest.mark.filterwarnings("ignore"),  # Flower's own
]


def test_tls_and_authenticated_supernodes(tmp_path):
    """As docs/engines.md describes it; who is not registered takes no part."""
    from examples.flower import credentials
    from examples.flower.drjax_app.client import load as load_points
    from examples.flower.plan import save
    from examples.flower.plan import step as fit

    credentials.make(tmp_path, 3)
    save(2, tmp_path / "step.drjax")
    ca, output = tmp_path / "ca.pem", tmp_path / "model.npz"
    certificates = (
        "--ssl-ca-certfile", ca, "--ssl-certfile", tmp_path / "server.pem",
        "--ssl-keyfile", tmp_path / "server.key", "--enable-supernode-auth",
    )  # fmt: skip
    connection = f'root-certificates = "{ca}"'
    with federation(tmp_path, connection, *certificates) as link:
        nodes = []
        for i in range(2):
            key = tmp_path / f"node-{i}.pub"
            told = link.flwr("supernode", "register", key, "here", "--format", "json")
            nodes.append(str(json.loads(told)["node-id"]))
        for i in range(2):  # the partition ids are the other way round
            key = tmp_path / f"node-{i}"
            link.node(
                str(i), 1 - i, "--root-certificates", ca,
                "--auth-supernode-private-key", key,
            )  # fmt: skip
        stranger = link.node(
            "stranger", 0, "--root-certificates", ca, "--max-retries", 1,
            "--auth-supernode-private-key", tmp_path / "node-2",
        )  # fmt: skip
        plain = link.node("plain", 0, "--insecure", "--max-retries", 1)
        link.run(
            plan=str(tmp_path / "step.drjax"), output=str(output), rounds=2,
            timeout=120, nodes=" ".join(nodes),
        )  # fmt: skip
        wait_for(output.exists)
        for process in (stranger, plain):
            assert process.wait(60) != 0
    with np.load(output) as file:
        told, model = json.loads(str(file["told"])), file["model"]
    wanted = np.zeros(3, np.float32)
    rows = [
        load_points(SimpleNamespace(node_config={"partition-id": i})) for i in (1, 0)
    ]
    data = tuple(np.stack(column) for column in zip(*rows, strict=True))
    for a_round in told:
        assert a_round["dropped"] == {} and len(a_round["pids"]) == 2
        plan = drjax.make_plan(fit(2))(wanted, data)
        wanted, loss = reference.compile(plan)(wanted, data)
        np.testing.assert_allclose(loss, a_round["loss"], rtol=1e-5)
    np.testing.assert_allclose(model, wanted, rtol=1e-5)
