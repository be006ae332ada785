// The CPU kernels as a process: calls come line by line, memory is shared at a fixed address.
//
//   arm_runner FILE_DESCRIPTOR ADDRESS BYTES
//
// One line of output for each line of input; numbers are decimal, guards are addresses of pages
// that the call must not touch:
//   isas | use NAME | isa | packed DTYPE HEAD_SIZE TOKENS LAYOUT
//   attend CALL GUARD... | fuse CALL GUARD... | pack CALL LAYOUT GUARD...
#include <sys/mman.h>

#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "abi.h"

namespace {

constexpr size_t PAGE = 4096;

int64_t answer(const std::string& function, std::istringstream& line) {
  std::vector<int64_t> x;
  for (int64_t number; line >> number;) x.push_back(number);
  const auto call = (const relay_call*)x.at(0);
  if (function == "packed") return relay_packed(x[0], x.at(1), x.at(2), (relay_layout*)x.at(3));
  const size_t arguments = function == "pack" ? 2 : 1;
  const auto protect = [&](int protection) {
    for (size_t i = arguments; i < x.size(); ++i)
      if (mprotect((void*)x[i], PAGE, protection)) throw std::runtime_error("mprotect");
  };
  protect(PROT_NONE);
  int error = -1;
  if (function == "attend") error = relay_attend(call);
  if (function == "fuse") error = relay_fuse(call);
  if (function == "pack") error = relay_pack(call, (const relay_layout*)x.at(1));
  protect(PROT_READ | PROT_WRITE);
  return error;
}

}  // namespace

int main(int, char** arguments) {
  void* const address = (void*)std::stoll(arguments[2]);
  const size_t bytes = std::stoll(arguments[3]);
  const int file = std::stoi(arguments[1]);
  if (mmap(address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) != address) return 1;
  for (std::string text; std::getline(std::cin, text);) {
    std::istringstream line(text);
    std::string function, name;
    line >> function;
    if (function == "isas")
      std::cout << relay_isas();
    else if (function == "isa")
      std::cout << relay_isa();
    else if (function == "use" && line >> name)
      std::cout << relay_use_isa(name.c_str());
    else
      std::cout << answer(function, line);
    std::cout << std::endl;
  }
}
