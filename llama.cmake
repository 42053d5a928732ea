# What is changed in llama.cpp's build, see docs/decisions/0005-llama-cpp-build.md: its common library, a third of the work of
# which nothing is used, is left out; the standard headers are compiled once; source files are compiled 24 at a time; and
# what computes nothing itself is optimized little (ggml's kernels are compiled as they were).
set(LLAMA_BUILD_COMMON OFF)
cmake_language(DEFER CALL target_precompile_headers llama PRIVATE
  <algorithm> <array> <cmath> <functional> <map> <memory> <regex> <set> <sstream> <string> <unordered_map> <vector>)
cmake_language(DEFER CALL target_compile_options llama PRIVATE -O1)

function(quantkit_join_sources)
  get_target_property(sources llama SOURCES)
  get_target_property(folder llama SOURCE_DIR)
  list(FILTER sources INCLUDE REGEX "^[^/]*\\.cpp$")
  list(REMOVE_ITEM sources llama-kv-cache-dsv4.cpp)  # defines a function that another file defines, too
  list(TRANSFORM sources PREPEND "${folder}/")
  set_source_files_properties(${sources} TARGET_DIRECTORY llama PROPERTIES SKIP_UNITY_BUILD_INCLUSION OFF)
  set_target_properties(llama PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 24)
endfunction()
cmake_language(DEFER CALL quantkit_join_sources)
