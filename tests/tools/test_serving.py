"""examples/ray_serve.py on a Ray cluster of its own: every request is answered, and nothing piles up."""

from __future__ import annotations

import base64
import io
import json
import os
import select
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

import tomadiff
from tomadiff.tools.loading import load

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_serve.py"
PATH = "/v1/images/generations"
SIZES = ("32x32", "64x32") * 7 + ("64x64", "128x128")  # in turn; the large ones take ten times as long
# glibc keeps freed memory for later, up to 15 MB here, more or less as it happens; so it tells what is in use
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
PATIENCE = 300  # seconds, for something that should have come long before
QUICK: dict[str, Any] = {"prompt": "pizza", "steps": 2, "size": "64x64"}
LONG: dict[str, Any] = {"prompt": "pizza", "steps": 50, "n": 4, "size": "64x64"}  # ten seconds
ROOM = 1 + 8  # requests: one is drawn, the others wait
INVALID: list[tuple[dict[str, Any], str]] = [  # and the field that is to blame
    ({"prompt": ""}, "prompt"),
    ({"prompt": " \n"}, "prompt"),
    ({"prompt": "a" * 1001}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": "dragon"}, "prompt"),  # which the model doesn't know
    ({"n": 0}, "n"),
    ({"n": 5}, "n"),
    ({"n": "2"}, "n"),
    ({"size": "1024x1024"}, "size"),
    ({"size": "64"}, "size"),
    ({"steps": 0}, "steps"),
    ({"steps": 51}, "steps"),
    ({"seed": -1}, "seed"),
    ({"model": "dall-e-3"}, "model"),
    ({"response_format": "url"}, "response_format"),
    ({"quality": "hd"}, "quality"),
]


@dataclass
class Server:
    port: int
    process: subprocess.Popen
    home: Path

    def ask(self, body: Any, method: str = "POST", path: str = PATH) -> tuple[int, Any]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
            return answer.status, json.loads(content) if content.startswith(b"{") else content.decode()
        finally:
            connection.close()

    def send(self, body: Any) -> socket.socket:
        """Ask, but leave it to others to wait for the answer."""
        content = json.dumps(body).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(content)}\r\n\r\n"
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.sendall(head.encode() + content)
        return connection

    def hang_up_in_the_middle(self) -> None:
        generator = self.generator()
        with self.send(LONG):
            begin = seconds(generator)
            while seconds(generator) < begin + 0.3:
                time.sleep(0.01)

    def generator(self) -> psutil.Process:
        everybody = psutil.Process(self.process.pid).children(recursive=True)
        (found,) = (child for child in everybody if "ImageGenerator" in " ".join(child.cmdline()))
        return found


def seconds(process: psutil.Process) -> float:
    """That it had of a CPU, however busy the machine is."""
    used = process.cpu_times()
    return used.user + used.system


@pytest.fixture(scope="module")
def server(free_port: int) -> Iterator[Server]:
    """The example, started as its page says."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets are in it: their paths must be short
    environment = os.environ | {"RAY_ADDRESS": "local", "RAY_TMPDIR": str(folder)} | GIVE_BACK
    environment["HOME"] = str(folder)
    command = [sys.executable, str(EXAMPLE), "--port", str(free_port)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        running = Server(free_port, process, folder)
        wait_for(running, folder / "log")
        yield running
    finally:
        everybody = [psutil.Process(process.pid)] if process.poll() is None else []
        everybody += [child for one in everybody for child in one.children(recursive=True)]
        before = len((folder / "log").read_text())
        process.terminate()
        _, left = psutil.wait_procs(everybody, timeout=PATIENCE)
        for child in left:
            child.kill()
        process.wait()
        said = (folder / "log").read_text()
        shutil.rmtree(folder, ignore_errors=True)
    assert not left, "all of Ray ends with the example"
    assert process.returncode == 0, said[-5000:]
    assert "Traceback" not in said[before:], "it ends quietly"


def wait_for(server: Server, log: Path) -> None:
    begin = time.monotonic()
    while True:
        try:
            if server.ask(QUICK)[0] == 200:
                return
        except OSError:  # it does not listen yet
            pass
        if server.process.poll() is not None or time.monotonic() - begin > PATIENCE:
            raise RuntimeError(f"the example does not answer:\n{log.read_text()[-5000:]}")
        time.sleep(0.2)


def pictures_in(answer: dict[str, Any]) -> list[Image.Image]:
    pictures = [Image.open(io.BytesIO(base64.b64decode(item["b64_json"]))) for item in answer["data"]]
    for picture in pictures:
        assert picture.format == "PNG"
        picture.load()
    return pictures


def test_a_hundred_requests_are_answered_without_growth(server: Server) -> None:
    """Valid and invalid ones in any order, by six clients; one more hangs up in the middle of its picture.

    The replica's memory, measured after the same 25 requests, must not grow by more than 6 MB: with a leak of
    100 kB for each picture put in, it grew by 12 MB.
    """
    requests: list[tuple[dict[str, Any], str | None]] = [(QUICK | wrong, field) for wrong, field in INVALID]
    requests += [
        (QUICK | {"size": SIZES[i % 16], "steps": 1 + (i % 5 == 0), "n": 1 + (i % 9 == 0)}, None)
        for i in range(100 - len(requests))
    ]
    requests = [requests[i * 37 % 100] for i in range(100)]
    generator, bodies = server.generator(), [body for body, _ in requests]
    with ThreadPoolExecutor(6) as clients:
        server.hang_up_in_the_middle()
        list(clients.map(server.ask, bodies[75:]))  # warm up
        before = generator.memory_info().rss
        answers = list(clients.map(server.ask, bodies[:50]))
        server.hang_up_in_the_middle()
        answers += clients.map(server.ask, bodies[50:])
        growth = (generator.memory_info().rss - before) / 2**20
    for (body, field), (status, answer) in zip(requests, answers, strict=True):
        if field is None:
            assert status == 200, answer
            sizes = [f"{picture.width}x{picture.height}" for picture in pictures_in(answer)]
            assert sizes == [body["size"]] * body["n"]
        else:
            assert status == 400 and answer["error"]["param"] == field
            assert answer["error"]["message"].startswith(f"{field}: ")
            assert answer["error"]["type"] == "invalid_request_error"
    print(f"the replica has {before / 2**20:.0f} MB after the warm-up, and {growth:+.1f} MB in the end")
    assert growth < 6
    assert server.generator().pid == generator.pid, "it is the same process to the end"


def test_a_full_queue_is_told_apart_and_forgotten_when_its_clients_hang_up(server: Server) -> None:
    """Meanwhile the server says that it is healthy, and bad requests are refused for what is bad in them."""
    generator = server.generator()
    begin = seconds(generator)
    assert server.ask(LONG | {"steps": 2})[0] == 200
    short = seconds(generator) - begin

    with ExitStack() as connections:
        waiting = [connections.enter_context(server.send(LONG)) for _ in range(2 * ROOM + 5)]
        while len(waiting) > ROOM + 5:  # Ray takes some more at times when many come at once
            answered, _, _ = select.select(waiting, [], [], PATIENCE)
            assert answered, "many more requests were taken than there is room for"
            for client in answered:
                waiting.remove(client)
                answer = HTTPResponse(client)
                answer.begin()
                assert answer.status == 503
                error = json.loads(answer.read())["error"]
                assert error["code"] == "queue_full" and "try later" in error["message"]
        assert server.ask(None, "GET", "/-/healthz") == (200, "success")
        assert server.ask(QUICK | {"n": 9})[0] == 400

    begin = seconds(generator)
    while server.ask(QUICK)[0] == 503:  # hanging up takes a moment to be noticed
        time.sleep(0.1)
    spent = seconds(generator) - begin
    assert spent < 12 * short, "a single one of those pictures takes 25 times as much"


def test_pictures_are_those_of_the_merged_pipeline_also_after_an_interrupted_one(server: Server) -> None:
    """What is kept from step to step ends with its generation, also with one that broke off."""
    server.hang_up_in_the_middle()
    order = {"prompt": "hot dog", "n": 2, "steps": 8, "seed": 3, "size": "64x32"}
    status, answer = server.ask(order)
    assert status == 200
    pipe = load("emoji-unet")
    asked = {"num_images_per_prompt": 2, "num_inference_steps": 8, "width": 64, "height": 32}
    dense = pipe("hot dog", generator=torch.Generator().manual_seed(3), **asked).images
    tomadiff.apply(pipe, ratio=0.5)
    merged = pipe("hot dog", generator=torch.Generator().manual_seed(3), **asked).images
    served, merged, dense = (
        np.array([np.array(picture, dtype=float) for picture in pictures])
        for pictures in (pictures_in(answer), merged, dense)
    )
    # another process may round otherwise
    assert np.abs(served - merged).mean() < 0.1 * np.abs(served - dense).mean()


def test_null_is_left_out(server: Server) -> None:
    order = QUICK | dict.fromkeys(("n", "size", "response_format", "model", "seed"))
    status, answer = server.ask(order)
    assert status == 200, answer
    assert [picture.size for picture in pictures_in(answer)] == [(128, 128)]


def test_requests_come_from_this_machine_and_rays_own_ports_ask_for_a_token(server: Server) -> None:
    everybody = psutil.Process(server.process.pid).children(recursive=True)
    opened = [c.laddr for child in everybody for c in child.net_connections("tcp") if c.status == "LISTEN"]
    assert {address.ip for address in opened if address.port == server.port} == {"127.0.0.1"}
    (raylet,) = (child for child in everybody if child.name() == "raylet")
    assert raylet.environ()["RAY_AUTH_MODE"] == "token"
    (token,) = server.home.glob(".ray/*")
    assert stat.S_IMODE(token.stat().st_mode) == 0o600, "others on this machine could read it"


def test_the_openai_client_is_content(server: Server) -> None:
    import openai  # takes seconds

    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    answer = client.images.generate(prompt="pizza", n=2, size="32x32", extra_body={"steps": 2})
    assert [picture.size for picture in pictures_in(answer.model_dump())] == [(32, 32)] * 2
    with pytest.raises(openai.BadRequestError, match=r"n: .* less than or equal to 4") as refusal:
        client.images.generate(prompt="pizza", n=9)
    assert (refusal.value.param, refusal.value.type) == ("n", "invalid_request_error")
    with pytest.raises(openai.NotFoundError):
        client.models.list()


@pytest.mark.parametrize("content", [b"", b"[]", b"nonsense", b"\xff"])
def test_what_is_no_order_is_refused(server: Server, content: bytes) -> None:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    connection.request("POST", PATH, content, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 400
    error = json.loads(answer.read())["error"]
    assert "body" in error["message"] and error["type"] == "invalid_request_error"
    connection.close()
