# find_package(needle): the target needle::needle. Found beside the Python package: python -m needle.config --cmake
get_filename_component(needle_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
if(NOT TARGET needle::needle)
  add_library(needle::needle SHARED IMPORTED)
  set_target_properties(needle::needle PROPERTIES IMPORTED_LOCATION "${needle_prefix}/lib/libneedle.so"
                                                  INTERFACE_INCLUDE_DIRECTORIES "${needle_prefix}/include")
endif()
