"""`explain.distribution.packaging`, under its public name."""

from explain.distribution.exporting import Patterns
from explain.distribution.packaging import Packaged, export_package, import_package
from explain.distribution.report import PackageReport

__all__ = ["PackageReport", "Packaged", "Patterns", "export_package", "import_package"]
