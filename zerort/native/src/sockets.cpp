// See sockets.h.
#include "sockets.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

namespace zerort {
namespace {

constexpr int kTagBits = 33;  // of a head; the rest is the length
constexpr std::uint32_t kFarAhead = 1 << 16;  // calls: numbers of 32 bits begin again, what seems farther ahead is long over
constexpr std::size_t kMostStrangers = 256;
constexpr std::size_t kManyBytes = 256 * 1024;  // to wake for: each time costs as much as copying some ten KiB
constexpr std::size_t kWindow = 64 * 1024;      // what a kernel takes in before anybody reads
constexpr std::size_t kMostParts = 64;          // of one read

bool may_pass(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

void close_socket(int& socket) {
  if (socket >= 0) ::close(socket);
  socket = -1;
}

// Let no firewall forget a connection that is seldom used.
void keep_alive(int socket) {
  const int yes = 1, seconds = 60;
  setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof yes);
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof seconds);
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &seconds, sizeof seconds);
}

// How a connection finds out how much it may send: BBR, or whatever the machine uses.
std::string control_of(int socket) {
  char name[16] = {};
  socklen_t nbytes = sizeof name - 1;
  return getsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name, &nbytes) == 0 ? name : "";
}

void set_control(int socket, const std::string& name) {
  setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name.c_str(), socklen_t(name.size()));
}

// BBR sends at the rate that it saw last. Several connections share a link, in bursts: each has seen its share of it, and one that
// goes on alone leaves the rest of the link empty. Any process may use Reno instead.
constexpr const char* kPaced = "bbr";
constexpr const char* kUnpaced = "reno";

void set_send_buffer(int socket, int nbytes) { setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &nbytes, sizeof nbytes); }

std::runtime_error too_few_files() {
  return std::runtime_error(std::string("Expected a socket for a rank of another host, got: ") + std::strerror(errno) +
                            ". Allow more open files (ulimit -n), or set ZERORT_SOCKETS=never.");
}

std::logic_error our_mistake(const std::string& expected) {
  return std::logic_error("Expected " + expected + ". This is a mistake of zerort's own: please report it.");
}

// Leave those in the list that still have something to do.
template <typename Side>
void forget_idle(std::vector<Side*>& sides) {
  sides.erase(std::remove_if(sides.begin(), sides.end(), [](const Side* one) { return one->queue.empty(); }), sides.end());
}

}  // namespace

Sockets::Sockets(int rank, const Token& token, int listener, const std::vector<Peer>& peers)
    : rank_(rank), token_(token), listener_(listener) {
  for (const Peer& peer : peers) {
    outgoing_[peer.rank].peer = peer;
    incoming_[peer.rank].rank = peer.rank;
  }
}

void Sockets::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  close_socket(listener_);
  for (auto& [rank, one] : outgoing_) {
    close_socket(one.socket);
    one.is_broken = true;
  }
  for (auto& [rank, one] : incoming_) {
    close_socket(one.socket);
    one.is_broken = true;
  }
  for (Stranger& one : strangers_) close_socket(one.socket);
  strangers_.clear();
}

double Sockets::round_trip() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::uint32_t longest = 0;  // µs
  for (const auto& [rank, one] : outgoing_) {
    tcp_info known = {};
    socklen_t nbytes = sizeof known;
    if (one.socket >= 0 && getsockopt(one.socket, IPPROTO_TCP, TCP_INFO, &known, &nbytes) == 0 && ~known.tcpi_min_rtt != 0)
      longest = std::max(longest, known.tcpi_min_rtt);  // all ones: nothing was answered yet
  }
  return longest * 1e-6;
}

void Sockets::limit_buffers(int nbytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  send_buffer_ = nbytes;
  for (auto& [rank, one] : outgoing_)
    if (one.socket >= 0) set_send_buffer(one.socket, nbytes);
}

void Sockets::go_far() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_far_ = true;
  const std::string usual = control_of(listener_);
  for (auto& [rank, one] : outgoing_)
    if (one.socket >= 0) set_control(one.socket, usual);
}

void Sockets::send(int rank, Tag tag, const void* from, std::size_t nbytes, const Pending& pending) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Outgoing& to = outgoing_.at(rank);
  Sending message = {{}, kHead, static_cast<const char*>(from), nbytes, pending};
  const std::uint64_t head = std::uint64_t(nbytes) << kTagBits | tag;
  std::memcpy(message.head, &head, kHead);
  if (to.socket < 0 && !to.is_broken) connect(to);
  ++*pending;
  const bool was_idle = to.queue.empty();
  to.queue.push_back(std::move(message));
  if (was_idle) {
    write(to);  // most have gone with this
    if (!to.queue.empty()) writing_.push_back(&to);
  }
}

void Sockets::turn_to(std::uint64_t call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto next = std::int64_t(call);
  if (next < now_) throw our_mistake("numbers of calls that grow, got " + std::to_string(next) + " after " + std::to_string(now_));
  now_ = next;
}

void Sockets::take_back(const Pending& pending) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [rank, to] : outgoing_) {
    for (Sending& one : to.queue) {
      if (one.pending != pending || one.done == 0) continue;
      one.instead.resize(one.nbytes);
      one.from = one.instead.data();
      one.pending = nullptr;
      --*pending;
    }
    const auto is_unsent = [&pending](const Sending& one) { return one.pending == pending; };
    const auto kept = std::remove_if(to.queue.begin(), to.queue.end(), is_unsent);
    *pending -= std::size_t(to.queue.end() - kept);
    to.queue.erase(kept, to.queue.end());
  }
}

void Sockets::receive(int rank, Tag tag, std::vector<Room> rooms, std::size_t likely_nbytes, const Pending& pending) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Incoming& from = incoming_.at(rank);
  ++*pending;
  if (from.queue.empty()) reading_.push_back(&from);
  from.queue.push_back({tag, std::move(rooms), likely_nbytes, pending});
  from.is_unasked = false;  // look again
}

std::size_t Sockets::Incoming::length() const {
  if (head_done == kHead) return nbytes;
  std::size_t likely = queue.front().likely_nbytes;
  for (const Receiving& one : queue) likely = std::min(likely, one.likely_nbytes);
  return likely;
}

std::size_t Sockets::Incoming::rest() const {
  return head_done == kHead ? nbytes - done : kHead - head_done + length();
}

bool Sockets::Incoming::is_for(const Pending& mine) const {
  return std::all_of(queue.begin(), queue.end(), [&mine](const Receiving& one) { return one.pending == mine; });
}

bool Sockets::Incoming::holds_up(const Pending& mine) const {
  return socket >= 0 && !is_unasked && queue.size() == 1 && is_for(mine) && length() > 0 && length() <= kWindow;
}

// Use connections until one holds `mine` up, then those only that are for others, too: they must not wait for `mine`.
template <typename Use>
void Sockets::for_each_that_matters(const Pending& mine, const Use& use) {
  bool is_held_up = false;
  for (auto one = reading_.rbegin(); one != reading_.rend(); ++one) {  // who was asked last most often comes last
    if (is_held_up && (*one)->is_for(mine)) continue;
    use(**one);
    is_held_up = is_held_up || (*one)->holds_up(mine);
  }
}

void Sockets::progress(const Pending& mine) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (lacks_connection()) admit();
  for (Outgoing* one : writing_) write(*one);
  for_each_that_matters(mine, [this](Incoming& from) { read(from); });
  forget_idle(writing_);
  forget_idle(reading_);
}

void Sockets::sleep(const Pending& mine, double seconds) {
  std::vector<pollfd> ready;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Outgoing* one : writing_)
      if (!one->queue.empty() && !one->is_broken) ready.push_back({one->socket, POLLOUT, 0});
    for_each_that_matters(mine, [this, &ready](Incoming& from) {
      if (from.queue.empty() || from.socket < 0 || from.is_unasked) return;
      wake_for_rest(from);
      ready.push_back({from.socket, POLLIN, 0});
    });
    if (lacks_connection()) {
      ready.push_back({listener_, POLLIN, 0});
      for (const Stranger& one : strangers_) ready.push_back({one.socket, POLLIN, 0});
    }
  }
  const auto ns = std::int64_t(seconds * 1e9);
  const timespec most = {time_t(ns / 1'000'000'000), long(ns % 1'000'000'000)};
  ppoll(ready.data(), ready.size(), &most, nullptr);  // `progress` finds out what it was
}

void Sockets::connect(Outgoing& to) {
  to.socket = ::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (to.socket < 0) throw too_few_files();
  const int yes = 1;
  setsockopt(to.socket, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  keep_alive(to.socket);
  if (!is_far_ && control_of(to.socket) == kPaced) set_control(to.socket, kUnpaced);
  if (send_buffer_ > 0) set_send_buffer(to.socket, send_buffer_);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(to.peer.address);
  address.sin_port = htons(to.peer.port);
  if (::connect(to.socket, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 && errno != EINPROGRESS) {
    to.is_broken = true;
    return;
  }
  Sending hello = {{}, kHello, nullptr, 0, nullptr};
  const std::int32_t both[2] = {rank_, to.peer.rank};
  std::memcpy(hello.head, token_.data(), token_.size());
  std::memcpy(hello.head + token_.size(), both, sizeof both);
  to.queue.push_front(std::move(hello));
  writing_.push_back(&to);
}

void Sockets::write(Outgoing& to) {
  while (!to.queue.empty() && !to.is_broken) {
    Sending& message = to.queue.front();
    iovec parts[2];
    std::size_t count = 0;
    if (message.done < message.head_nbytes) parts[count++] = {message.head + message.done, message.head_nbytes - message.done};
    const std::size_t gone = message.done - std::min(message.done, message.head_nbytes);
    if (gone < message.nbytes) parts[count++] = {const_cast<char*>(message.from) + gone, message.nbytes - gone};
    msghdr said = {};
    said.msg_iov = parts;
    said.msg_iovlen = count;
    // MSG_EOR: else the kernel may hold the last few bytes back until all before them have left ("autocorking").
    const ssize_t sent = sendmsg(to.socket, &said, MSG_DONTWAIT | MSG_NOSIGNAL | MSG_EOR);
    if (sent < 0) {
      to.is_broken = !may_pass(errno);
      return;
    }
    message.done += std::size_t(sent);
    if (message.done < message.head_nbytes + message.nbytes) return;
    if (message.pending) --*message.pending;
    to.queue.pop_front();
  }
}

// Have the kernel wake this rank for the rest of a message, or for a good part of a long one.
void Sockets::wake_for_rest(Incoming& from) {
  const std::size_t rest = from.rest();
  const int wanted = int(rest >= kManyBytes ? kManyBytes : std::min(rest, kWindow));
  if (wanted == from.low_water) return;
  from.low_water = wanted;
  setsockopt(from.socket, SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted);
}

// Read into the rooms, which have as much room, until they hold `nbytes`; true if they do.
bool Sockets::take(Incoming& from, const Room* rooms, std::size_t& done, std::size_t nbytes) {
  while (done < nbytes) {
    iovec parts[kMostParts];
    std::size_t count = 0, first = 0;  // of a room, among all
    for (const Room* room = rooms; first < nbytes && count < kMostParts; first += (room++)->nbytes) {
      const std::size_t filled = done - std::min(done, first), end = std::min(room->nbytes, nbytes - first);
      if (filled < end) parts[count++] = {room->to + filled, end - filled};
    }
    msghdr heard = {};
    heard.msg_iov = parts;
    heard.msg_iovlen = count;
    const ssize_t came = recvmsg(from.socket, &heard, MSG_DONTWAIT);
    if (!note(from, came)) return false;
    done += std::size_t(came);
  }
  return true;
}

// Of data for an earlier call: all that were asked for of those have come, so it is what its sender thought all would call.
bool Sockets::is_late(const Incoming& from) const {
  if (from.tag == kGreeting) return false;
  const auto calls = std::uint32_t(from.tag >> 1) - std::uint32_t(now_);  // until that one
  if (calls > 1 && calls < kFarAhead)
    throw our_mistake("data of call " + std::to_string(now_) + " or the next from rank " + std::to_string(from.rank) +
                      ", got data of the call " + std::to_string(calls) + " later");
  return calls > 1;
}

// Read the rest of a message that nobody wants; true if that was all.
bool Sockets::throw_away(Incoming& from) {
  char nowhere[16 * 1024];
  while (from.done < from.nbytes) {
    const ssize_t came = recv(from.socket, nowhere, std::min(from.nbytes - from.done, sizeof nowhere), MSG_DONTWAIT);
    if (!note(from, came)) return false;
    from.done += std::size_t(came);
  }
  return true;
}

// Say whether bytes came; if none ever will, the connection is broken.
bool Sockets::note(Incoming& from, ssize_t came) {
  if (came > 0) return true;
  if (came == 0 || !may_pass(errno)) {
    close_socket(from.socket);
    from.is_broken = true;
  }
  return false;
}

void Sockets::read(Incoming& from) {
  const Room head_room = {from.head, kHead};
  while (!from.queue.empty() && from.socket >= 0) {
    if (from.head_done < kHead) {
      if (!take(from, &head_room, from.head_done, kHead)) return;
      std::uint64_t head;
      std::memcpy(&head, from.head, kHead);
      from.nbytes = head >> kTagBits;
      from.tag = head & ((Tag(1) << kTagBits) - 1);
      from.done = 0;
    }
    if (is_late(from)) {
      if (!throw_away(from)) return;
      from.head_done = 0;
      continue;
    }
    const auto mine =
        std::find_if(from.queue.begin(), from.queue.end(), [&from](const Receiving& one) { return one.tag == from.tag; });
    from.is_unasked = mine == from.queue.end();
    if (from.is_unasked) return;
    std::size_t room = 0;
    for (const Room& one : mine->rooms) room += one.nbytes;
    if (from.nbytes > room) throw std::runtime_error("Expected a message that fits into its room, got a longer one.");
    if (!take(from, mine->rooms.data(), from.done, from.nbytes)) return;
    from.head_done = 0;
    --*mine->pending;
    from.queue.erase(mine);
  }
}

bool Sockets::lacks_connection() const {
  return std::any_of(reading_.begin(), reading_.end(), [](const Incoming* one) { return one->socket < 0 && !one->is_broken; });
}

void Sockets::admit() {
  for (;;) {
    const int socket = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (socket < 0 && (errno == EMFILE || errno == ENFILE)) throw too_few_files();
    if (socket < 0) break;
    keep_alive(socket);
    strangers_.push_back({socket, {}});
  }
  strangers_.erase(
      std::remove_if(strangers_.begin(), strangers_.end(), [this](Stranger& one) { return hear_hello(one); }), strangers_.end());
  while (strangers_.size() > kMostStrangers + incoming_.size()) {  // they are none of ours
    close_socket(strangers_.front().socket);
    strangers_.erase(strangers_.begin());
  }
}

// True if it is known who it is, or that it is nobody of this group.
bool Sockets::hear_hello(Stranger& stranger) {
  const ssize_t came = recv(stranger.socket, stranger.hello + stranger.done, kHello - stranger.done, MSG_DONTWAIT);
  if (came < 0 && may_pass(errno)) return false;
  if (came > 0 && (stranger.done += std::size_t(came)) < kHello) return false;
  std::int32_t both[2];
  std::memcpy(both, stranger.hello + token_.size(), sizeof both);
  const auto found = incoming_.find(both[0]);
  if (came <= 0 || both[1] != rank_ || std::memcmp(stranger.hello, token_.data(), token_.size()) != 0 || found == incoming_.end() ||
      found->second.socket >= 0) {
    close_socket(stranger.socket);
    return true;
  }
  found->second.socket = stranger.socket;
  return true;
}

}  // namespace zerort
