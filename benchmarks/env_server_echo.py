"""A bare FastAPI WebSocket echo: the ceiling of what a FastAPI server can do.

python -m benchmarks.env_server_echo PORT
"""

from __future__ import annotations

import sys

import uvicorn
from fastapi import FastAPI, WebSocket, WebSocketDisconnect

app = FastAPI()


@app.get("/health")
async def health() -> dict[str, str]:
    """Tell that it runs."""
    return {"status": "healthy"}


@app.websocket("/ws")
async def echo(websocket: WebSocket) -> None:
    """Answer each frame with itself."""
    await websocket.accept()
    try:
        while True:
            await websocket.send_text(await websocket.receive_text())
    except WebSocketDisconnect:
        return


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
