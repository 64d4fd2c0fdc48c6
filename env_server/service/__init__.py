"""SQLEnv as a network service: one WebSocket is one session, one asyncio process serves many.

Nothing here blocks the event loop: SQL that may take long runs in child processes (`execution`).
"""
