"""Processes that are started before anyone needs them."""

from __future__ import annotations

import asyncio

from cardan.engine.children import Children
from cardan.engine.frontend import Frontend


def test_children_that_nobody_takes_end_and_leave_no_folder():
    children = Children()
    folder, started = children.folder, list(children._children)
    assert folder.is_dir()
    assert all(child.running for child in started)
    children.close()
    assert not any(child.running for child in started)
    assert not folder.exists()
    children.close()


def test_a_frontend_takes_children_that_were_started_before(null_config):
    async def scenario():
        children = Children()
        early = [child.pid for child in children._children]
        frontend = await Frontend.start(null_config(), children=children)
        try:
            assert sorted(frontend.child_pids.values()) == sorted(early)
            children.close()
            assert frontend.alive
        finally:
            await frontend.close()
        assert not children.folder.exists()

    asyncio.run(scenario())
