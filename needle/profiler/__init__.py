from needle.files import write_file

from .peaks import Peaks, cpu_name, fma_peak, measure_peaks
from .result import Event, Profile, Row
from .run import profile

__all__ = ["Event", "Peaks", "Profile", "Row", "cpu_name", "fma_peak", "measure_peaks", "profile", "write_file"]
