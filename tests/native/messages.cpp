// Messages over sockets, by ranks as threads of one process over the loopback; a second thread of each rank moves messages, too.
// Before some rounds a rank sends what is for a call that is over, and takes it back.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "harness.h"
#include "sockets.h"

namespace harness {
namespace {

constexpr std::size_t kMost = 100'000;

struct Listener {
  int socket;
  std::uint16_t port;
};

Listener listen_somewhere() {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  EXPECT(bind(socket, reinterpret_cast<sockaddr*>(&address), length) == 0);
  EXPECT(listen(socket, 64) == 0);
  EXPECT(getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length) == 0);
  return {socket, ntohs(address.sin_port)};
}

// What `from` sends to `to`, the same for both.
std::vector<char> message(std::uint64_t seed, int round, int from, int to, int tag) {
  Random random(mix(seed) ^ std::uint64_t(((round * 64 + from) * 64 + to) * 2 + tag));
  std::vector<char> found(random.below(4) == 0 ? random.below(kMost) : random.below(100));
  for (std::size_t k = 0; k < found.size(); k += 1 + k / 64) found[k] = char(random.below(256));
  return found;
}

}  // namespace

void exchange_messages(const Trial& trial, Figures& figures) {
  std::vector<Listener> listeners;
  for (int rank = 0; rank < trial.size; rank++) listeners.push_back(listen_somewhere());
  on_ranks(trial.size, [&](int rank) {
    std::vector<zerort::Sockets::Peer> peers;
    for (int other = 0; other < trial.size; other++)
      if (other != rank) peers.push_back({other, INADDR_LOOPBACK, listeners[std::size_t(other)].port});
    zerort::Sockets sockets(rank, {}, listeners[std::size_t(rank)].socket, peers);
    if (trial.seed % 2 == 0) sockets.limit_buffers(64 * 1024);  // then long messages leave in parts
    std::atomic<bool> is_over{false};
    std::thread beside([&] {
      Random random(trial.seed + std::uint64_t(rank));
      const auto nothing = std::make_shared<std::atomic<std::size_t>>(0);
      while (!is_over.load()) {
        sockets.progress(nothing);
        stumble(random);
      }
    });
    Random random(trial.seed * 31 + std::uint64_t(rank));
    for (int round = 0; round < trial.rounds; round++) {
      const std::uint64_t call = std::uint64_t(round), given_up = call - 1;  // for which nobody waits any more
      const zerort::Sockets::Tag tags[] = {zerort::Sockets::data_of(call), zerort::Sockets::kGreeting};
      if (random.below(3) == 0) {
        const auto ahead = std::make_shared<std::atomic<std::size_t>>(0);
        const std::vector<char> unwanted(random.below(4) == 0 ? 20 * kMost : kMost);
        for (int other = 0; other < trial.size; other++) {
          if (other == rank) continue;
          sockets.send(other, zerort::Sockets::data_of(given_up), unwanted.data(), unwanted.size(), ahead);
        }
        stumble(random);
        sockets.take_back(ahead);
        EXPECT(*ahead == 0);
      }
      sockets.turn_to(call);
      const auto pending = std::make_shared<std::atomic<std::size_t>>(0);
      std::vector<std::vector<char>> sent, rooms;
      sent.reserve(std::size_t(2 * trial.size));  // messages are sent from where they lie
      rooms.reserve(std::size_t(2 * trial.size));
      for (int other = 0; other < trial.size; other++)
        for (int tag = 0; other != rank && tag < 2; tag++) {
          rooms.emplace_back(kMost);
          const int asked = 1 - tag;  // not in the order in which they are sent
          const std::size_t cut = random.below(kMost), likely = random.below(2) == 0 ? 0 : random.below(kMost);
          sockets.receive(other, tags[asked], {{rooms.back().data(), cut}, {rooms.back().data() + cut, kMost - cut}}, likely, pending);
          stumble(random);
          sent.push_back(message(trial.seed, round, rank, other, tag));
          sockets.send(other, tags[tag], sent.back().data(), sent.back().size(), pending);
        }
      while (*pending != 0) {
        sockets.progress(pending);
        sockets.sleep(pending, 1e-3);
      }
      std::size_t at = 0;
      for (int other = 0; other < trial.size; other++)
        for (int tag = 0; other != rank && tag < 2; tag++) {
          const std::vector<char> expected = message(trial.seed, round, other, rank, 1 - tag);
          EXPECT(std::equal(expected.begin(), expected.end(), rooms[at].begin()));
          at++;
        }
    }
    is_over = true;
    beside.join();
  });
  figures["messages"] += std::uint64_t(trial.rounds) * 2 * std::uint64_t(trial.size) * std::uint64_t(trial.size - 1);
}

}  // namespace harness
