"""Pictures from a merged pipeline on Ray Serve, in the shape of OpenAI's images API; see docs/serving.md.

python examples/ray_serve.py [--host 127.0.0.1] [--port 8000]
"""

import argparse
import asyncio
import base64
import io
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, StringConstraints, model_validator
from ray import serve
from ray.serve.exceptions import BackPressureError
from starlette.exceptions import HTTPException

import tomadiff

MODEL, DEVICE, DTYPE = "emoji-unet", "cpu", "fp32"  # or any hub id or folder, "cuda", "fp16"
SIZES = ("128x128", "64x64", "64x32", "32x32")  # width x height; the first is the default


class Order(BaseModel, extra="forbid", strict=True):
    """What may be asked for: OpenAI's fields as far as there is a choice here, and steps and seed."""

    model: Literal[MODEL] = MODEL
    prompt: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=1000)]
    n: int = Field(1, ge=1, le=4)
    size: Literal[SIZES] = SIZES[0]
    response_format: Literal["b64_json"] = "b64_json"
    steps: int = Field(24, ge=1, le=50)
    seed: int | None = Field(None, ge=0, lt=2**63)

    @model_validator(mode="before")
    @classmethod
    def null_is_left_out(cls, given: Any) -> Any:
        """As in OpenAI's API."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


@serve.deployment(
    max_ongoing_requests=1, max_queued_requests=8, ray_actor_options={"num_gpus": int(DEVICE == "cuda")}
)
class ImageGenerator:
    def __init__(self):
        from tomadiff.tools.loading import load  # torch takes seconds to import, and only here it is needed

        self.pipe = load(MODEL, DEVICE, DTYPE)
        self.pipe.set_progress_bar_config(disable=True)
        tomadiff.apply(self.pipe, ratio=0.5)
        self.thread = ThreadPoolExecutor(max_workers=1)  # one picture at a time; the event loop stays free

    async def draw(self, *order):
        gone = threading.Event()
        try:
            return await asyncio.get_running_loop().run_in_executor(self.thread, self.paint, gone, *order)
        finally:
            gone.set()  # Ray cancels this coroutine when the client hangs up

    def paint(self, gone, prompt, n, size, steps, seed):
        def stop_if_gone(pipe, step, timestep, tensors):
            if gone.is_set():
                raise InterruptedError("nobody waits for this picture")
            return tensors

        import torch

        width, height = map(int, size.split("x"))
        generator = torch.Generator()
        generator.seed() if seed is None else generator.manual_seed(seed)
        sized = {"width": width, "height": height, "num_inference_steps": steps, "num_images_per_prompt": n}
        pictures = self.pipe(prompt, **sized, generator=generator, callback_on_step_end=stop_if_gone).images
        files = [io.BytesIO() for _ in pictures]
        for picture, file in zip(pictures, files):
            picture.save(file, "PNG")
        return [base64.b64encode(file.getvalue()).decode() for file in files]


app = FastAPI()


def problem(status, message, kind="invalid_request_error", param=None, code=None):
    error = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": error}, status)


@app.exception_handler(RequestValidationError)
async def invalid(request, error):
    first = error.errors()[0]
    param = next((part for part in first["loc"][1:] if isinstance(part, str)), None)
    return problem(400, f"{param or 'body'}: {first['msg']}", param=param, code=first["type"])


@app.exception_handler(HTTPException)
async def elsewhere(request, error):  # another path or method
    return problem(error.status_code, error.detail)


@app.exception_handler(Exception)
async def failed(request, error):
    return problem(500, "the picture could not be drawn: the server's log says why", "server_error")


@serve.deployment(max_ongoing_requests=100, max_queued_requests=100, ray_actor_options={"num_cpus": 0})
@serve.ingress(app)
class Images:
    """Checks requests, so that bad ones are refused at once, and waits for a generator with the others."""

    def __init__(self, generator):
        self.generator = generator

    @app.post("/v1/images/generations")
    async def generate(self, order: Order):
        try:
            drawn = await self.generator.draw.remote(
                order.prompt, order.n, order.size, order.steps, order.seed
            )
        except BackPressureError:
            return problem(503, "too many requests are waiting: try later", "server_error", code="queue_full")
        except ValueError as error:  # what the pipeline refuses
            return problem(400, f"prompt: {getattr(error, 'cause', error)}", param="prompt")
        return {"created": int(time.time()), "data": [{"b64_json": picture} for picture in drawn]}


images = Images.bind(ImageGenerator.bind())

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = vars(parser.parse_args())
    os.umask(0o077)  # Ray keeps the token that guards its own ports in ~/.ray: for nobody else to read
    try:
        serve.start(http_options=options)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as by Ctrl-C
        serve.run(images, blocking=True)
    except KeyboardInterrupt:
        serve.delete("default")  # a cluster that was there before would go on serving it
