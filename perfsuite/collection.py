"""pytest's hooks that collect cases, alike in the session's own process and in workers."""

from __future__ import annotations

import inspect
import unittest
from fnmatch import fnmatch
from pathlib import Path

import pytest

from perfsuite.collect import CaseClass, CaseModule, is_case_file


class CollectionPlugin:
    """Collects case files; registered where perfsuite is active."""

    def __init__(self, config: pytest.Config) -> None:
        self._patterns = tuple(config.getini("perf_cases"))
        self._test_files = tuple(config.getini("python_files"))
        self._root = config.rootpath

    def _is_case_file(self, path: Path, session: pytest.Session) -> bool:
        return is_case_file(path, patterns=self._patterns, root=self._root, named=session.isinitpath(path))

    def pytest_collect_file(self, file_path: Path, parent: pytest.Collector) -> pytest.Module | None:
        """Case files that pytest would not collect by itself."""
        session = parent.session
        collected_anyway = session.isinitpath(file_path) or any(
            fnmatch(file_path.name, pattern) for pattern in self._test_files
        )
        if collected_anyway or not self._is_case_file(file_path, session):
            return None
        module: CaseModule = CaseModule.from_parent(parent, path=file_path)
        return module

    def pytest_pycollect_makemodule(self, module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
        """Case files that pytest collects because they were named, or are test files too."""
        if not self._is_case_file(module_path, parent.session):
            return None
        module: CaseModule = CaseModule.from_parent(parent, path=module_path)
        return module

    def pytest_pycollect_makeitem(
        self, collector: pytest.Module | pytest.Class, name: str, obj: object
    ) -> pytest.Class | None:
        """Test classes in case files: their methods may be cases; unittest's are left to its plugin."""
        if not isinstance(collector, CaseModule | CaseClass) or not inspect.isclass(obj):
            return None
        if issubclass(obj, unittest.TestCase) or not collector.istestclass(obj, name):
            return None
        case_class: CaseClass = CaseClass.from_parent(collector, name=name, obj=obj)
        return case_class
